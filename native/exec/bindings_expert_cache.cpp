#include "bindings_expert_cache.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <tuple>

#include "bindings.h"
#include "src/cpu_branch.h"
#include "src/expert_cache.h"

namespace py = pybind11;
using namespace pybind11::literals;
using namespace freetoken::exec;

namespace {

std::unique_ptr<ExpertCache> make_cache(
    const BankExperts& bank, FillLink& link, Address slots, Address slot_of_expert,
    Address expert_of_slot, Address slot_key, Address demanded_at, Address score, Address clock,
    Address slots_count, std::size_t slots_capacity, bool cpu_kernel, std::int64_t half_life_ticks,
    std::int64_t ticks_per_layer, Address fillable, Address table_of_layer, Address fill_count,
    std::size_t buckets_count, std::size_t misses_capacity) {
  const ExpertCacheSpec spec{
      .pool = bank.bank(),
      .slots = at<std::byte>(slots),
      .arrays = {.slot_of_expert = at<std::int32_t>(slot_of_expert),
                 .expert_of_slot = at<std::int32_t>(expert_of_slot),
                 .slot_key = at<std::int64_t>(slot_key),
                 .demanded_at = at<std::int64_t>(demanded_at),
                 .score = at<std::int64_t>(score),
                 .clock = at<std::int64_t>(clock),
                 .slots_count = at<const std::int32_t>(slots_count),
                 .slots_capacity = slots_capacity},
      .order = {.half_life_ticks = half_life_ticks, .ticks_per_layer = ticks_per_layer},
      .cpu_kernel = cpu_kernel,
      .fillable = at<const std::int32_t>(fillable),
      .table_of_layer = at<const std::int32_t>(table_of_layer),
      .fill_count = at<const std::int32_t>(fill_count),
      .buckets_count = buckets_count,
      .misses_capacity = misses_capacity};
  return std::make_unique<ExpertCache>(spec, link);
}

std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t> layer_counts(
    const ExpertCache& cache, std::size_t moe_layer_index) {
  const LayerCounts counts = cache.layer_counts(moe_layer_index);
  return {counts.hits, counts.misses, counts.fills, counts.cpu, counts.evictions};
}

// (layer, bucket, misses, fills, cpu, fill_s, cpu_s, layer_s) of each.
py::list take_call_times(ExpertCache& cache) {
  py::list taken;
  for (const CallTimes& one : cache.take_call_times()) {
    taken.append(py::make_tuple(one.layer, one.bucket, one.misses, one.fills, one.cpu, one.fill_s,
                                one.cpu_s, one.layer_s));
  }
  return taken;
}

std::unique_ptr<CpuBranch> make_branch(Executor& executor, const BankExperts& bank, Address x,
                                       Address ids, Address weights, Address tokens, Address y,
                                       std::size_t tokens_capacity, std::size_t top_k, Address ring,
                                       Address done) {
  return std::make_unique<CpuBranch>(
      executor, bank.bank(),
      CpuBranchBuffers{.x = at<const Bf16>(x),
                       .ids = at<const std::int32_t>(ids),
                       .weights = at<const float>(weights),
                       .tokens = at<const std::int32_t>(tokens),
                       .y = at<float>(y),
                       .tokens_capacity = tokens_capacity,
                       .top_k = top_k},
      Doorbells{.ring = at<std::uint32_t>(ring), .done = at<std::uint32_t>(done)});
}

void bind_cpu_branch(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<CpuBranch>(module, "CpuBranch")
      .def(py::init(&make_branch), "executor"_a, "bank"_a, py::kw_only(), "x"_a, "ids"_a,
           "weights"_a, "tokens"_a, "y"_a, "tokens_capacity"_a, "top_k"_a, "ring"_a, "done"_a,
           py::keep_alive<1, 2>())
      .def_static("host_function",
                  [] { return reinterpret_cast<Address>(CpuBranch::host_function()); })
      .def(
          "task",
          [](CpuBranch& branch, std::size_t moe_layer_index) {
            return reinterpret_cast<Address>(branch.task(moe_layer_index));
          },
          "moe_layer_index"_a)
      .def("begin_step", &CpuBranch::begin_step, Release())
      .def("end_step", &CpuBranch::end_step, Release())
      .def("take_fault", &CpuBranch::take_fault)
      .def_property_readonly("executions_count", &CpuBranch::executions_count)
      .def_property_readonly("calls_count", &CpuBranch::calls_count)
      .def_property_readonly("busy_s", &CpuBranch::busy_s);
}

}  // namespace

void bind_expert_cache(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  bind_cpu_branch(module);
  const py::object dispatch = module.attr("ExpertDispatch");
  py::class_<ExpertCache>(module, "ExpertCache")
      .def(py::init(&make_cache), py::kw_only(), "bank"_a, "link"_a, "slots"_a, "slot_of_expert"_a,
           "expert_of_slot"_a, "slot_key"_a, "demanded_at"_a, "score"_a, "clock"_a, "slots_count"_a,
           "slots_capacity"_a, "cpu_kernel"_a, "half_life_ticks"_a, "ticks_per_layer"_a,
           "fillable"_a, "table_of_layer"_a, "fill_count"_a, "buckets_count"_a, "misses_capacity"_a,
           py::keep_alive<1, 3>())
      .def(
          "prefetch",
          [](ExpertCache& cache, std::size_t moe_layer_index, Address wanted) {
            cache.prefetch(moe_layer_index, at<const std::int32_t>(wanted));
          },
          "moe_layer_index"_a, py::kw_only(), "wanted"_a, Release())
      .def("let_go", &ExpertCache::let_go, Release())
      .def("set_kept_count", &ExpertCache::set_kept_count, "kept_count"_a)
      .def("set_ahead_count", &ExpertCache::set_ahead_count, "ahead_count"_a)
      .def("take_call_times", &take_call_times)
      .def("layer_counts", &layer_counts, "moe_layer_index"_a)
      .def_property_readonly("executions_count", &ExpertCache::executions_count)
      .def_property_readonly("streamed_count", &ExpertCache::streamed_count)
      .def_property_readonly("gained_count", &ExpertCache::gained_count);
  py::class_<DecodeExperts>(module, "DecodeExperts", dispatch)
      .def(py::init<ExpertCache&>(), "cache"_a, py::keep_alive<1, 2>());
  py::class_<SweepExperts>(module, "SweepExperts", dispatch)
      .def(py::init<ExpertCache&>(), "cache"_a, py::keep_alive<1, 2>());
}
