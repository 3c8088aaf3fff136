// Python face of the executor: addresses are integers, the GIL is released during every call.
#include "bindings.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings_cache.h"
#include "bindings_expert_cache.h"
#include "bindings_fill.h"
#include "src/executor.h"
#include "src/isa.h"
#include "src/layout.h"
#include "src/weight_format.h"

namespace py = pybind11;
using namespace pybind11::literals;
using namespace freetoken::exec;

Activation parse_activation(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "swiglu_oai") return Activation::kSwigluOai;
  throw std::invalid_argument("unknown activation '" + name + "'");
}

namespace {

using Release = py::call_guard<py::gil_scoped_release>;

Executor* make_executor(std::vector<int> cpus, double spin_s, const std::string& isa) {
  const std::chrono::duration<double> spin(spin_s);
  return new Executor(std::move(cpus), std::chrono::duration_cast<std::chrono::nanoseconds>(spin),
                      isa);
}

void linear(Executor& executor, Address x, Address w, Address y, std::size_t tokens,
            std::size_t in_features, std::size_t out_features, Address bias,
            const std::string& weight_format, bool fast) {
  const LinearOutput output{.w = at<const std::byte>(w),
                            .format = parse_weight_format(weight_format),
                            .bias = at<const float>(bias),
                            .y = at<float>(y),
                            .out_features = out_features};
  executor.linear({.x = at<const Bf16>(x),
                   .tokens = tokens,
                   .in_features = in_features,
                   .outputs = {&output, 1},
                   .fast = fast});
}

void experts(Executor& executor, Address x, Address expert_ids, Address weights, Address y,
             std::size_t tokens, std::size_t top_k, std::size_t hidden_size,
             std::size_t intermediate_size, Address bank, std::size_t record_bytes,
             std::size_t experts_count, const std::string& weight_format, bool has_bias,
             const std::string& activation, float activation_limit, float activation_alpha,
             bool fast) {
  executor.experts({.x = at<const Bf16>(x),
                    .expert_ids = at<const std::int32_t>(expert_ids),
                    .weights = at<const float>(weights),
                    .y = at<float>(y),
                    .tokens = tokens,
                    .top_k = top_k,
                    .hidden = hidden_size,
                    .intermediate = intermediate_size,
                    .bank = at<const std::byte>(bank),
                    .record_bytes = record_bytes,
                    .experts_count = experts_count,
                    .format = parse_weight_format(weight_format),
                    .has_bias = has_bias,
                    .glu = {.activation = parse_activation(activation),
                            .limit = activation_limit,
                            .alpha = activation_alpha},
                    .fast = fast});
}

void merge(Executor& executor, Address y, Address out, std::size_t tokens, std::size_t top_k,
           std::size_t hidden_size) {
  executor.merge(at<const float>(y), at<float>(out), tokens, top_k, hidden_size);
}

void rms_norm(Executor& executor, Address x, Address weight, Address y, std::size_t rows,
              std::size_t size, float eps) {
  executor.rms_norm(at<const float>(x), at<const float>(weight), at<Bf16>(y), rows, size, eps);
}

void embed_rows16(Executor& executor, Address w, Address ids, Address out, std::size_t tokens,
                  std::size_t features, std::size_t vocab_size) {
  executor.embed_rows16(at<const std::byte>(w), at<const std::int64_t>(ids), at<float>(out), tokens,
                        features, vocab_size);
}

void store_kv(Executor& executor, Address k, Address v, Address k_pages, Address v_pages,
              Address page_table, Address sequence_index, Address positions, std::size_t tokens,
              std::size_t kv_heads, std::size_t head_size, std::size_t page_tokens,
              std::size_t max_pages, std::size_t sequences_count, std::size_t pages_count) {
  executor.store_kv({.k = at<const float>(k),
                     .v = at<const float>(v),
                     .k_pages = at<Bf16>(k_pages),
                     .v_pages = at<Bf16>(v_pages),
                     .page_table = at<const std::int32_t>(page_table),
                     .sequence_index = at<const std::int32_t>(sequence_index),
                     .positions = at<const std::int32_t>(positions),
                     .tokens = tokens,
                     .kv_heads = kv_heads,
                     .head_size = head_size,
                     .page_tokens = page_tokens,
                     .max_pages = max_pages,
                     .sequences = sequences_count,
                     .pages = pages_count});
}

void paged_attention(Executor& executor, Address q, Address k_pages, Address v_pages,
                     Address page_table, Address sequence_index, Address positions, Address out,
                     std::size_t tokens, std::size_t q_heads, std::size_t kv_heads,
                     std::size_t head_size, std::size_t page_tokens, std::size_t max_pages,
                     float scale, std::size_t sequences_count, std::size_t pages_count) {
  executor.paged_attention({.q = at<const float>(q),
                            .k_pages = at<const Bf16>(k_pages),
                            .v_pages = at<const Bf16>(v_pages),
                            .page_table = at<const std::int32_t>(page_table),
                            .sequence_index = at<const std::int32_t>(sequence_index),
                            .positions = at<const std::int32_t>(positions),
                            .out = at<Bf16>(out),
                            .tokens = tokens,
                            .q_heads = q_heads,
                            .kv_heads = kv_heads,
                            .head_size = head_size,
                            .page_tokens = page_tokens,
                            .max_pages = max_pages,
                            .sequences = sequences_count,
                            .pages = pages_count,
                            .scale = scale});
}

void sample(Executor& executor, Address logits, Address params, Address token_ids, Address peaks,
            std::size_t rows, std::size_t vocab_size) {
  executor.sample({.logits = at<const float>(logits),
                   .params = at<const SamplingParams>(params),
                   .token_ids = at<std::int32_t>(token_ids),
                   .peaks = at<float>(peaks),
                   .rows = rows,
                   .vocab = vocab_size});
}

void bind_executor(py::module_& module) {
  py::class_<Executor>(module, "Executor")
      .def(py::init(&make_executor), "cpus"_a, py::kw_only(), "spin_s"_a, "isa"_a)
      .def_property_readonly("isa", [](const Executor& executor) { return executor.isa(); })
      .def_property_readonly("threads_count", &Executor::threads_count)
      .def(
          "has_fast",
          [](const Executor& executor, const std::string& weight_format) {
            return executor.has_fast(parse_weight_format(weight_format));
          },
          "weight_format"_a)
      .def("linear", &linear, Release(), "x"_a, "w"_a, "y"_a, py::kw_only(), "tokens"_a,
           "in_features"_a, "out_features"_a, "bias"_a, "weight_format"_a, "fast"_a)
      .def("experts", &experts, Release(), "x"_a, "expert_ids"_a, "weights"_a, "y"_a, py::kw_only(),
           "tokens"_a, "top_k"_a, "hidden_size"_a, "intermediate_size"_a, "bank"_a,
           "record_bytes"_a, "experts_count"_a, "weight_format"_a, "has_bias"_a, "activation"_a,
           "activation_limit"_a, "activation_alpha"_a, "fast"_a)
      .def("merge", &merge, Release(), "y"_a, "out"_a, py::kw_only(), "tokens"_a, "top_k"_a,
           "hidden_size"_a)
      .def("rms_norm", &rms_norm, Release(), "x"_a, "weight"_a, "y"_a, py::kw_only(), "rows"_a,
           "size"_a, "eps"_a)
      .def("embed_rows16", &embed_rows16, Release(), "w"_a, "ids"_a, "out"_a, py::kw_only(),
           "tokens"_a, "features"_a, "vocab_size"_a)
      .def("store_kv", &store_kv, Release(), "k"_a, "v"_a, "k_pages"_a, "v_pages"_a, "page_table"_a,
           "sequence_index"_a, "positions"_a, py::kw_only(), "tokens"_a, "kv_heads"_a,
           "head_size"_a, "page_tokens"_a, "max_pages"_a, "sequences_count"_a, "pages_count"_a)
      .def("paged_attention", &paged_attention, Release(), "q"_a, "k_pages"_a, "v_pages"_a,
           "page_table"_a, "sequence_index"_a, "positions"_a, "out"_a, py::kw_only(), "tokens"_a,
           "q_heads"_a, "kv_heads"_a, "head_size"_a, "page_tokens"_a, "max_pages"_a, "scale"_a,
           "sequences_count"_a, "pages_count"_a)
      .def("sample", &sample, Release(), "logits"_a, "params"_a, "token_ids"_a, "peaks"_a,
           py::kw_only(), "rows"_a, "vocab_size"_a)
      .def(
          "stream_read",
          [](Executor& executor, Address data, std::size_t length_bytes) {
            return executor.stream_read(at<const std::byte>(data), length_bytes);
          },
          Release(), "data"_a, "length_bytes"_a);
}

}  // namespace

PYBIND11_MODULE(_exec, module) {
  module.doc() = "CPU kernels and the executor's threads.";
  bind_executor(module);
  bind_cache(module);
  bind_fill(module);
  bind_program(module);
  bind_expert_cache(module);
  module.def("available_isas", &available_isas);
  module.def(
      "rows16_bytes",
      [](std::size_t rows, std::size_t columns) { return rows16_bytes(rows, columns); }, "rows"_a,
      "columns"_a);
  module.def(
      "expert_bytes",
      [](const std::string& weight_format, std::size_t hidden, std::size_t intermediate,
         bool has_bias) {
        return expert_layout(parse_weight_format(weight_format), hidden, intermediate, has_bias)
            .bytes;
      },
      "weight_format"_a, "hidden_size"_a, "intermediate_size"_a, "has_bias"_a);
  module.def(
      "matrix_bytes",
      [](const std::string& weight_format, std::size_t rows, std::size_t columns) {
        return parse_weight_format(weight_format).matrix_bytes(rows, columns);
      },
      "weight_format"_a, "rows"_a, "columns"_a);
  module.def(
      "pack_rows16",
      [](Address source, std::size_t rows, std::size_t columns, Address packed) {
        pack_rows16(at<const Bf16>(source), rows, columns, at<Bf16>(packed));
      },
      Release(), "source"_a, "rows"_a, "columns"_a, "packed"_a);
  module.def(
      "unpack_rows16",
      [](Address packed, std::size_t rows, std::size_t columns, Address target) {
        unpack_rows16(at<const Bf16>(packed), rows, columns, at<Bf16>(target));
      },
      Release(), "packed"_a, "rows"_a, "columns"_a, "target"_a);
}
