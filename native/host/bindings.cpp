// Thin bindings: every call that can block releases the GIL; no thread of the core takes it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "lifeline.hpp"
#include "loader.hpp"
#include "mapping.hpp"
#include "pinner.hpp"
#include "private_tmpfs.hpp"
#include "ranges.hpp"
#include "reservation.hpp"

namespace py = pybind11;
namespace fh = freetoken::host;

namespace {

using FileTuple = std::tuple<std::string, std::uint64_t, std::uint64_t>;

const char* failure_name(fh::LoadFailure failure) {
  switch (failure) {
    case fh::LoadFailure::kNone:
      return "none";
    case fh::LoadFailure::kCancelled:
      return "cancelled";
    case fh::LoadFailure::kOpen:
      return "open";
    case fh::LoadFailure::kLength:
      return "length";
    case fh::LoadFailure::kRead:
      return "read";
    case fh::LoadFailure::kMemory:
      return "memory";
    case fh::LoadFailure::kQueue:
      return "queue";
  }
  return "none";
}

std::unique_ptr<fh::Loader> make_loader(std::shared_ptr<fh::Mapping> mapping,
                                        const std::vector<FileTuple>& files, bool use_uring,
                                        bool use_direct, bool use_huge_pages,
                                        std::uint32_t chunk_bytes, std::uint32_t start_depth_count,
                                        std::uint32_t max_depth_count,
                                        std::uint32_t workers_count) {
  std::vector<fh::LoadFile> load_files;
  for (const auto& [path, destination_bytes, length_bytes] : files) {
    load_files.push_back({path, destination_bytes, length_bytes});
  }
  fh::LoadOptions options{.use_uring = use_uring,
                          .use_direct = use_direct,
                          .use_huge_pages = use_huge_pages,
                          .chunk_bytes = chunk_bytes,
                          .start_depth_count = start_depth_count,
                          .max_depth_count = max_depth_count,
                          .workers_count = workers_count,
                          .make_queue = {}};
  return std::make_unique<fh::Loader>(std::move(mapping), std::move(load_files),
                                      std::move(options));
}

py::memoryview view(const fh::Mapping& mapping, std::uint64_t offset_bytes,
                    std::uint64_t length_bytes) {
  if (mapping.data() == nullptr) throw std::logic_error("the pool mapping is closed");
  if (offset_bytes > mapping.length_bytes() ||
      length_bytes > mapping.length_bytes() - offset_bytes) {
    throw std::out_of_range("the view lies outside the pool mapping");
  }
  return py::memoryview::from_memory(static_cast<const void*>(mapping.data() + offset_bytes),
                                     static_cast<py::ssize_t>(length_bytes));
}

void bind_mapping(py::module_& m) {
  py::class_<fh::Mapping, std::shared_ptr<fh::Mapping>>(m, "Mapping")
      .def(py::init<int, std::uint64_t>(), py::arg("fd"), py::arg("length_bytes"))
      .def_property_readonly(
          "address",
          [](const fh::Mapping& self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
      .def_property_readonly("length_bytes", &fh::Mapping::length_bytes)
      .def("advise_huge", &fh::Mapping::advise_huge)
      .def("interleave", &fh::Mapping::interleave, py::arg("nodes"))
      .def("protect_read_only", &fh::Mapping::protect_read_only,
           py::call_guard<py::gil_scoped_release>())
      .def("store_u64", &fh::Mapping::store_u64, py::arg("offset_bytes"), py::arg("value"))
      .def("load_u64", &fh::Mapping::load_u64, py::arg("offset_bytes"))
      .def("view", &view, py::arg("offset_bytes"), py::arg("length_bytes"))
      .def("close", &fh::Mapping::close, py::call_guard<py::gil_scoped_release>());
}

void bind_loader(py::module_& m) {
  py::class_<fh::LoadOutcome>(m, "LoadOutcome")
      .def_property_readonly("failure",
                             [](const fh::LoadOutcome& self) { return failure_name(self.failure); })
      .def_readonly("error_number", &fh::LoadOutcome::error_number)
      .def_readonly("path", &fh::LoadOutcome::path)
      .def_readonly("offset_bytes", &fh::LoadOutcome::offset_bytes)
      .def_readonly("actual_bytes", &fh::LoadOutcome::actual_bytes)
      .def_readonly("io", &fh::LoadOutcome::io)
      .def_readonly("io_note", &fh::LoadOutcome::io_note)
      .def_readonly("huge_pages_error", &fh::LoadOutcome::huge_pages_error)
      .def_readonly("buffered_files_count", &fh::LoadOutcome::buffered_files_count)
      .def_readonly("depth_count", &fh::LoadOutcome::depth_count)
      .def_readonly("workers_count", &fh::LoadOutcome::workers_count)
      .def_readonly("loaded_bytes", &fh::LoadOutcome::loaded_bytes)
      .def_readonly("elapsed_s", &fh::LoadOutcome::elapsed_s);
  py::class_<fh::Loader>(m, "Loader")
      .def(py::init(&make_loader), py::arg("mapping"), py::arg("files"), py::kw_only(),
           py::arg("use_uring"), py::arg("use_direct"), py::arg("use_huge_pages"),
           py::arg("chunk_bytes"), py::arg("start_depth_count"), py::arg("max_depth_count"),
           py::arg("workers_count"))
      .def("start", &fh::Loader::start)
      .def("wait", &fh::Loader::wait_for, py::arg("timeout_s"),
           py::call_guard<py::gil_scoped_release>())
      .def("cancel", &fh::Loader::cancel, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("done_bytes", &fh::Loader::done_bytes)
      .def_property_readonly("outcome", [](const fh::Loader& self) { return self.outcome(); });
  m.def("uring_refusal", &fh::uring_refusal);
}

void bind_pinner(py::module_& m) {
  py::class_<fh::PinProgress>(m, "PinProgress")
      .def_readonly("pinned_bytes", &fh::PinProgress::pinned_bytes)
      .def_readonly("total_bytes", &fh::PinProgress::total_bytes)
      .def_readonly("done", &fh::PinProgress::done)
      .def_readonly("error_number", &fh::PinProgress::error_number)
      .def_readonly("limited", &fh::PinProgress::limited)
      .def_readonly("elapsed_s", &fh::PinProgress::elapsed_s)
      .def_readonly("note", &fh::PinProgress::note);
  py::class_<fh::Pinner>(m, "Pinner")
      .def(py::init<std::shared_ptr<fh::Mapping>, std::uint64_t, std::uint64_t, std::uint64_t>(),
           py::arg("mapping"), py::arg("offset_bytes"), py::arg("length_bytes"),
           py::arg("step_bytes"))
      .def("progress", &fh::Pinner::progress)
      .def("abort", &fh::Pinner::abort, py::call_guard<py::gil_scoped_release>());
}

using AddressRange = std::tuple<std::uintptr_t, std::uintptr_t, std::uint64_t>;

void copy_ranges(const std::vector<AddressRange>& ranges) {
  std::vector<fh::CopyRange> copies;
  copies.reserve(ranges.size());
  for (const auto& [from, to, length_bytes] : ranges) {
    copies.push_back(
        {reinterpret_cast<const std::byte*>(from), reinterpret_cast<std::byte*>(to), length_bytes});
  }
  const py::gil_scoped_release released;
  fh::copy_ranges(copies);
}

void bind_reservation(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<fh::Reservation>(m, "Reservation")
      .def(py::init<std::uint64_t>(), py::arg("length_bytes"))
      .def_property_readonly(
          "address",
          [](const fh::Reservation& self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
      .def_property_readonly("length_bytes", &fh::Reservation::length_bytes)
      .def("commit", &fh::Reservation::commit, py::arg("offset_bytes"), py::arg("length_bytes"),
           Release())
      .def("release", &fh::Reservation::release, py::arg("offset_bytes"), py::arg("length_bytes"),
           Release())
      .def("close", &fh::Reservation::close, Release());
  m.def("copy_ranges", &copy_ranges, py::arg("ranges"));
  m.def(
      "first_difference",
      [](std::uintptr_t left, std::uintptr_t right, std::uint64_t length_bytes) {
        return fh::first_difference(reinterpret_cast<const std::byte*>(left),
                                    reinterpret_cast<const std::byte*>(right), length_bytes);
      },
      py::arg("left"), py::arg("right"), py::arg("length_bytes"), Release());
}

}  // namespace

PYBIND11_MODULE(_host, m, py::mod_gil_not_used()) {
  m.doc() = "Pool mapping, reserved memory, direct-I/O loader, pinning and the lifeline thread.";
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const std::system_error& error) {
      errno = error.code().value();
      PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code().value(), error.what()).ptr());
    }
  });
  bind_mapping(m);
  bind_loader(m);
  bind_pinner(m);
  bind_reservation(m);
  m.def("open_private_tmpfs_file", &fh::open_private_tmpfs_file, py::arg("size_bytes"),
        py::call_guard<py::gil_scoped_release>());
  py::class_<fh::Lifeline>(m, "Lifeline")
      .def(py::init<int, int>(), py::arg("fd"), py::arg("exit_code"))
      .def("stop", &fh::Lifeline::stop, py::call_guard<py::gil_scoped_release>());
}
