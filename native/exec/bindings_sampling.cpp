#include "bindings_sampling.h"

#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "src/executor.h"
#include "src/sampling.h"

namespace py = pybind11;
using namespace pybind11::literals;
using namespace freetoken::exec;

namespace {

// temperature, top_k, top_p, min_p, seed, draw index
using Row = std::tuple<double, std::int64_t, double, double, std::uint64_t, std::uint64_t>;
// token, whether the row is numbers, largest logit
using Choice = std::tuple<std::int64_t, bool, float>;

std::vector<Choice> sample(Executor& executor, Address logits, std::size_t vocab_size,
                           const std::vector<Row>& rows) {
  std::vector<SamplingParams> params;
  std::vector<std::uint64_t> draws;
  params.reserve(rows.size());
  draws.reserve(rows.size());
  for (const auto& [temperature, top_k, top_p, min_p, seed, draw_index] : rows) {
    params.push_back(
        {.temperature = temperature, .top_k = top_k, .top_p = top_p, .min_p = min_p, .seed = seed});
    draws.push_back(draw_index);
  }
  std::vector<SampleResult> results(rows.size());
  executor.sample({.logits = at<const float>(logits),
                   .params = params.data(),
                   .draw_index = draws.data(),
                   .out = results.data(),
                   .rows = rows.size(),
                   .vocab = vocab_size});
  std::vector<Choice> choices;
  choices.reserve(results.size());
  for (const SampleResult& one : results) choices.emplace_back(one.token, one.numbers, one.peak);
  return choices;
}

}  // namespace

void bind_sampling(py::module_& module) {
  module.def("sample_rows", &sample, py::call_guard<py::gil_scoped_release>(), "executor"_a,
             "logits"_a, py::kw_only(), "vocab_size"_a, "rows"_a);
}
