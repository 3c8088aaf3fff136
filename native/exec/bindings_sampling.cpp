#include "bindings_sampling.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <tuple>

#include "src/exclusive.h"
#include "src/sampling.h"
#include "src/validate.h"

namespace py = pybind11;
using namespace pybind11::literals;
using namespace freetoken::exec;

namespace {

// A scratch that refuses a second caller.
class Sampler {
 public:
  std::tuple<std::int64_t, bool, float> sample_row(std::uintptr_t logits, std::size_t vocab_size,
                                                   double temperature, std::int64_t top_k,
                                                   double top_p, double min_p, std::uint64_t seed,
                                                   std::uint64_t draw_index) {
    const Exclusive exclusive(busy_);
    require(logits != 0, "sample_row: null address");
    require(vocab_size > 0 && vocab_size <= UINT32_MAX,
            "sample_row: vocab_size must be positive and below 2^32");
    require(temperature >= 0 && top_p >= 0 && min_p >= 0,
            "sample_row: temperature, top_p and min_p must be numbers that are not negative");
    const SamplingParams params{
        .temperature = temperature, .top_k = top_k, .top_p = top_p, .min_p = min_p, .seed = seed};
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the interface
    const auto* row = reinterpret_cast<const float*>(logits);
    const SampleResult result =
        freetoken::exec::sample_row(row, vocab_size, params, draw_index, scratch_);
    return {result.token, result.numbers, result.peak};
  }

 private:
  std::atomic<bool> busy_{false};
  SamplingScratch scratch_;
};

}  // namespace

void bind_sampling(py::module_& module) {
  py::class_<Sampler>(module, "Sampler")
      .def(py::init<>())
      .def("sample_row", &Sampler::sample_row, py::call_guard<py::gil_scoped_release>(), "logits"_a,
           py::kw_only(), "vocab_size"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a,
           "seed"_a, "draw_index"_a);
}
