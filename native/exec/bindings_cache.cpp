#include "bindings_cache.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "bindings.h"
#include "src/cache_plan.h"

namespace py = pybind11;
using namespace pybind11::literals;
using namespace freetoken::exec;

namespace {

// Sizes and integers are checked by the planner; that something is there, here.
template <class T>
T* given(Address address, const char* name) {
  if (address == 0 || address % alignof(T) != 0) {
    throw std::invalid_argument(std::string(name) + " has no address, or one that is not aligned");
  }
  return at<T>(address);
}

std::unique_ptr<CachePlanner> make_planner(Address slot_of_expert, Address expert_of_slot,
                                           Address slot_key, Address demanded_at, Address score,
                                           Address clock, Address slots_count,
                                           std::size_t slots_capacity, std::size_t layers_count,
                                           std::size_t experts_per_layer_count, bool cpu_kernel,
                                           std::int64_t half_life_ticks,
                                           std::int64_t ticks_per_layer) {
  const CacheArrays arrays{.slot_of_expert = at<std::int32_t>(slot_of_expert),
                           .expert_of_slot = at<std::int32_t>(expert_of_slot),
                           .slot_key = at<std::int64_t>(slot_key),
                           .demanded_at = at<std::int64_t>(demanded_at),
                           .score = at<std::int64_t>(score),
                           .clock = at<std::int64_t>(clock),
                           .slots_count = at<const std::int32_t>(slots_count),
                           .slots_capacity = slots_capacity};
  const CacheShape shape{.layers_count = layers_count,
                         .experts_per_layer_count = experts_per_layer_count,
                         .cpu_kernel = cpu_kernel};
  return std::make_unique<CachePlanner>(
      arrays, shape,
      EvictionOrder{.half_life_ticks = half_life_ticks, .ticks_per_layer = ticks_per_layer});
}

void plan(CachePlanner& planner, std::size_t moe_layer_index, Address routed,
          std::size_t tokens_capacity, std::size_t top_k, Address valid_tokens, Address fillable,
          Address fill_count, std::size_t buckets_count, std::size_t misses_capacity,
          Address physical, Address fills, Address fills_count, Address cpu, Address cpu_count,
          Address stats) {
  planner.plan({.moe_layer_index = moe_layer_index,
                .routed = given<const std::int32_t>(routed, "routed"),
                .tokens_capacity = tokens_capacity,
                .top_k = top_k,
                .valid_tokens = given<const std::int32_t>(valid_tokens, "valid_tokens"),
                .fillable = given<const std::int32_t>(fillable, "fillable"),
                .fill_count = given<const std::int32_t>(fill_count, "fill_count"),
                .buckets_count = buckets_count,
                .misses_capacity = misses_capacity,
                .physical = given<std::int32_t>(physical, "physical"),
                .fills = given<Fill>(fills, "fills"),
                .fills_count = given<std::int32_t>(fills_count, "fills_count"),
                .cpu = given<std::int32_t>(cpu, "cpu"),
                .cpu_count = given<std::int32_t>(cpu_count, "cpu_count"),
                .stats = given<CacheStats>(stats, "stats")});
}

void reserve(CachePlanner& planner, std::size_t moe_layer_index, Address fillable, Address wanted,
             Address fills, Address fills_count, Address stats) {
  planner.reserve({.moe_layer_index = moe_layer_index,
                   .fillable = given<const std::int32_t>(fillable, "fillable"),
                   .wanted = wanted == 0 ? nullptr : given<const std::int32_t>(wanted, "wanted"),
                   .fills = given<Fill>(fills, "fills"),
                   .fills_count = given<std::int32_t>(fills_count, "fills_count"),
                   .stats = given<CacheStats>(stats, "stats")});
}

void release(CachePlanner& planner, std::size_t moe_layer_index, Address uses,
             std::size_t tokens_count, std::size_t kept_count) {
  planner.release({.moe_layer_index = moe_layer_index,
                   .uses = given<const std::int32_t>(uses, "uses"),
                   .tokens_count = tokens_count,
                   .kept_count = kept_count});
}

}  // namespace

void bind_cache(py::module_& module) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<CachePlanner>(module, "CachePlanner")
      .def(py::init(&make_planner), py::kw_only(), "slot_of_expert"_a, "expert_of_slot"_a,
           "slot_key"_a, "demanded_at"_a, "score"_a, "clock"_a, "slots_count"_a, "slots_capacity"_a,
           "layers_count"_a, "experts_per_layer_count"_a, "cpu_kernel"_a, "half_life_ticks"_a,
           "ticks_per_layer"_a)
      .def("plan", &plan, Release(), "moe_layer_index"_a, py::kw_only(), "routed"_a,
           "tokens_capacity"_a, "top_k"_a, "valid_tokens"_a, "fillable"_a, "fill_count"_a,
           "buckets_count"_a, "misses_capacity"_a, "physical"_a, "fills"_a, "fills_count"_a,
           "cpu"_a, "cpu_count"_a, "stats"_a)
      .def("reserve", &reserve, Release(), "moe_layer_index"_a, py::kw_only(), "fillable"_a,
           "wanted"_a, "fills"_a, "fills_count"_a, "stats"_a)
      .def("release", &release, Release(), "moe_layer_index"_a, py::kw_only(), "uses"_a,
           "tokens_count"_a, "kept_count"_a);
}
