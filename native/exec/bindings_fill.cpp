#include "bindings_fill.h"

#include <cstdint>

#include "bindings.h"
#include "src/fill_link.h"

namespace py = pybind11;
using namespace pybind11::literals;
using namespace freetoken::exec;

void bind_fill(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<FillTotals>(module, "FillTotals")
      .def_readonly("fills_count", &FillTotals::fills_count)
      .def_readonly("bytes", &FillTotals::bytes)
      .def_readonly("busy_s", &FillTotals::busy_s);
  py::class_<FillLink>(module, "FillLink")
      .def(py::init([](Address bank, std::size_t record_bytes, std::size_t experts_count,
                       Address slots, std::size_t slots_capacity, double rate_bytes_per_s) {
             return new FillLink({.bank = at<const std::byte>(bank),
                                  .record_bytes = record_bytes,
                                  .experts_count = experts_count,
                                  .slots = at<std::byte>(slots),
                                  .slots_capacity = slots_capacity},
                                 rate_bytes_per_s);
           }),
           py::kw_only(), "bank"_a, "record_bytes"_a, "experts_count"_a, "slots"_a,
           "slots_capacity"_a, "rate_bytes_per_s"_a)
      .def(
          "submit",
          [](FillLink& link, Address fills, std::size_t fills_count, std::size_t slots_count) {
            return link.submit(at<const Fill>(fills), fills_count, slots_count);
          },
          "fills"_a, "fills_count"_a, "slots_count"_a, Release())
      .def("is_done", &FillLink::is_done, "ticket"_a)
      .def("wait", &FillLink::wait, "ticket"_a, Release())
      .def("drain", &FillLink::drain, Release())
      .def("stop", &FillLink::stop, Release())
      .def("totals", &FillLink::totals)
      .def_property_readonly("rate_bytes_per_s", &FillLink::rate_bytes_per_s)
      .def("set_rate_bytes_per_s", &FillLink::set_rate_bytes_per_s, "rate_bytes_per_s"_a);
}
