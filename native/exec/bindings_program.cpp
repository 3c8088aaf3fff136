// Python face of step programs: addresses are integers, the GIL is released while ops run.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "src/program.h"
#include "src/routing_tap.h"

namespace py = pybind11;
using namespace pybind11::literals;
using namespace freetoken::exec;

namespace {

std::unique_ptr<KvPages> make_pages(const std::vector<std::pair<Address, Address>>& layers,
                                    std::size_t pages_count, std::size_t kv_heads,
                                    std::size_t page_tokens, std::size_t head_size) {
  auto pages = std::make_unique<KvPages>();
  for (const auto& [keys, values] : layers) {
    pages->layers.push_back({.keys = at<Bf16>(keys), .values = at<Bf16>(values)});
  }
  pages->pages_count = pages_count;
  pages->kv_heads = kv_heads;
  pages->page_tokens = page_tokens;
  pages->head_size = head_size;
  return pages;
}

std::unique_ptr<BankExperts> make_bank(Address records, std::size_t record_bytes,
                                       std::size_t layers_count,
                                       std::size_t experts_per_layer_count, std::size_t hidden_size,
                                       std::size_t intermediate_size,
                                       const std::string& weight_format, bool has_bias,
                                       const std::string& activation, float activation_limit,
                                       float activation_alpha, bool fast) {
  return std::make_unique<BankExperts>(
      ExpertBank{.records = at<const std::byte>(records),
                 .record_bytes = record_bytes,
                 .layers_count = layers_count,
                 .experts_per_layer_count = experts_per_layer_count,
                 .hidden = hidden_size,
                 .intermediate = intermediate_size,
                 .format = parse_weight_format(weight_format),
                 .has_bias = has_bias,
                 .glu = {.activation = parse_activation(activation),
                         .limit = activation_limit,
                         .alpha = activation_alpha},
                 .fast = fast});
}

std::unique_ptr<Program> make_program(const std::vector<std::pair<std::size_t, bool>>& buffers,
                                      ExpertDispatch* experts) {
  std::vector<BufferSpec> specs;
  specs.reserve(buffers.size());
  for (const auto& [row_bytes, per_output] : buffers) {
    specs.push_back({.row_bytes = row_bytes, .per_output = per_output});
  }
  return std::make_unique<Program>(std::move(specs), experts);
}

// Addresses and sizes of one step; what is behind the addresses must outlive it.
struct Step {
  StepCall call;
};

std::unique_ptr<Step> make_step(Address token_ids, std::size_t tokens, Address outputs,
                                std::size_t outputs_count, Address sampling, Address page_table,
                                Address sequence_index, Address positions, std::size_t sequences,
                                std::size_t max_pages, const KvPages& kv,
                                const std::vector<std::pair<Address, std::size_t>>& rotations) {
  auto step = std::make_unique<Step>();
  step->call = {.token_ids = at<const std::int64_t>(token_ids),
                .tokens = tokens,
                .outputs = at<const std::int64_t>(outputs),
                .outputs_count = outputs_count,
                .sampling = at<const SamplingParams>(sampling),
                .page_table = at<const std::int32_t>(page_table),
                .sequence_index = at<const std::int32_t>(sequence_index),
                .positions = at<const std::int32_t>(positions),
                .sequences = sequences,
                .max_pages = max_pages,
                .kv = &kv,
                .rotations = {}};
  for (const auto& [rows, positions_count] : rotations) {
    step->call.rotations.push_back(
        {.rows = at<const float>(rows), .positions_count = positions_count});
  }
  return step;
}

using Product = std::tuple<Address, std::string, Address, std::size_t, BufferIndex>;

void add_linear(Program& program, BufferIndex x, std::size_t in_features,
                const std::vector<Product>& products, bool fast) {
  LinearOp op{.x = x, .in_features = in_features, .products = {}, .fast = fast};
  for (const auto& [weight, format, bias, out_features, out] : products) {
    op.products.push_back({.w = at<const std::byte>(weight),
                           .format = parse_weight_format(format),
                           .bias = at<const float>(bias),
                           .out_features = out_features,
                           .out = out});
  }
  program.add(std::move(op));
}

void add_attention_ops(py::class_<Program>& program) {
  program
      .def(
          "add_head_norm",
          [](Program& self, BufferIndex x, std::size_t heads, std::size_t head_size, Address weight,
             float eps) {
            self.add(HeadNormOp{x, heads, head_size, at<const float>(weight), eps});
          },
          py::kw_only(), "x"_a, "heads"_a, "head_size"_a, "weight"_a, "eps"_a)
      .def(
          "add_rotate",
          [](Program& self, BufferIndex x, std::size_t heads, std::size_t head_size,
             std::size_t table) {
            self.add(RotateOp{x, heads, head_size, table});
          },
          py::kw_only(), "x"_a, "heads"_a, "head_size"_a, "table"_a)
      .def(
          "add_attend",
          [](Program& self, std::size_t layer_index, BufferIndex q, BufferIndex k, BufferIndex v,
             BufferIndex out, std::size_t q_heads, std::size_t kv_heads, std::size_t head_size,
             float scale) {
            self.add(AttendOp{layer_index, q, k, v, out, q_heads, kv_heads, head_size, scale});
          },
          py::kw_only(), "layer_index"_a, "q"_a, "k"_a, "v"_a, "out"_a, "q_heads"_a, "kv_heads"_a,
          "head_size"_a, "scale"_a);
}

void add_expert_ops(py::class_<Program>& program) {
  program
      .def(
          "add_router",
          [](Program& self, BufferIndex x, std::size_t hidden_size, std::size_t experts_count,
             Address weights, BufferIndex out) {
            RouterOp op{x, hidden_size, experts_count, {}, out};
            op.packed.resize(packed_router_floats(experts_count, hidden_size));
            pack_router(at<const float>(weights), experts_count, hidden_size, op.packed.data());
            self.add(std::move(op));
          },
          py::kw_only(), "x"_a, "hidden_size"_a, "experts_count"_a, "weights"_a, "out"_a)
      .def(
          "add_route",
          [](Program& self, BufferIndex logits, std::size_t experts_count, std::size_t top_k,
             bool renormalise, BufferIndex ids, BufferIndex weights) {
            Router router{.scoring = Scoring::kSoftmax};
            router.experts = experts_count;
            router.top_k = top_k;
            router.renormalise = renormalise;
            self.add(RouteOp{logits, router, ids, weights});
          },
          py::kw_only(), "logits"_a, "experts_count"_a, "top_k"_a, "renormalise"_a, "ids"_a,
          "weights"_a)
      .def(
          "add_experts",
          [](Program& self, std::size_t moe_layer_index, BufferIndex x, BufferIndex ids,
             BufferIndex weights, std::size_t top_k, std::size_t hidden_size, BufferIndex out) {
            self.add(ExpertsOp{moe_layer_index, x, ids, weights, top_k, hidden_size, out});
          },
          py::kw_only(), "moe_layer_index"_a, "x"_a, "ids"_a, "weights"_a, "top_k"_a,
          "hidden_size"_a, "out"_a);
}

void add_row_ops(py::class_<Program>& program) {
  program
      .def(
          "add_embed",
          [](Program& self, Address table, bool rows16, std::size_t vocab_size,
             std::size_t features, BufferIndex out) {
            self.add(EmbedOp{at<const std::byte>(table), rows16, vocab_size, features, out});
          },
          py::kw_only(), "table"_a, "rows16"_a, "vocab_size"_a, "features"_a, "out"_a)
      .def(
          "add_add",
          [](Program& self, BufferIndex residual, BufferIndex delta, std::size_t size) {
            self.add(AddOp{residual, delta, size});
          },
          py::kw_only(), "residual"_a, "delta"_a, "size"_a)
      .def(
          "add_add_rms_norm",
          [](Program& self, BufferIndex residual, std::optional<BufferIndex> delta, Address weight,
             float eps, std::size_t size, BufferIndex out) {
            self.add(AddRmsNormOp{residual, delta.has_value(), delta.value_or(0),
                                  at<const float>(weight), eps, size, out});
          },
          py::kw_only(), "residual"_a, "delta"_a, "weight"_a, "eps"_a, "size"_a, "out"_a)
      .def("add_linear", &add_linear, py::kw_only(), "x"_a, "in_features"_a, "products"_a, "fast"_a)
      .def(
          "add_glu",
          [](Program& self, BufferIndex gate, BufferIndex up, std::size_t size, BufferIndex out) {
            self.add(GluOp{gate, up, size, out});
          },
          py::kw_only(), "gate"_a, "up"_a, "size"_a, "out"_a)
      .def(
          "add_select_rows",
          [](Program& self, BufferIndex x, std::size_t size, BufferIndex out) {
            self.add(SelectRowsOp{x, size, out});
          },
          py::kw_only(), "x"_a, "size"_a, "out"_a)
      .def(
          "add_sample",
          [](Program& self, BufferIndex logits, std::size_t vocab_size, BufferIndex ids,
             BufferIndex peaks) {
            self.add(SampleOp{logits, vocab_size, ids, peaks});
          },
          py::kw_only(), "logits"_a, "vocab_size"_a, "ids"_a, "peaks"_a);
}

using TappedLayers = std::vector<std::tuple<std::size_t, std::size_t, std::size_t>>;

// What the tap has kept, forgotten there: layers, their ids as bytes, whether some had no room.
std::tuple<TappedLayers, py::bytes, bool> take_tapped(RoutingTap& tap) {
  TappedLayers layers;
  for (const TappedLayer& layer : tap.layers()) {
    layers.emplace_back(layer.moe_layer_index, layer.tokens, layer.top_k);
  }
  const auto* bytes = reinterpret_cast<const char*>(tap.ids().data());
  py::bytes ids(bytes, tap.ids().size() * sizeof(std::uint16_t));
  const bool overflowed = tap.overflowed();
  tap.clear();
  return {std::move(layers), std::move(ids), overflowed};
}

}  // namespace

void bind_program(py::module_& module) {
  py::class_<KvPages>(module, "KvPages")
      .def(py::init(&make_pages), "layers"_a, py::kw_only(), "pages_count"_a, "kv_heads"_a,
           "page_tokens"_a, "head_size"_a);
  py::class_<ExpertDispatch> dispatch(module, "ExpertDispatch");
  py::class_<BankExperts>(module, "BankExperts", dispatch)
      .def(py::init(&make_bank), "records"_a, py::kw_only(), "record_bytes"_a, "layers_count"_a,
           "experts_per_layer_count"_a, "hidden_size"_a, "intermediate_size"_a, "weight_format"_a,
           "has_bias"_a, "activation"_a, "activation_limit"_a, "activation_alpha"_a, "fast"_a)
      .def_property_readonly("executions_count", &BankExperts::executions_count);
  py::class_<RoutingTap>(module, "RoutingTap", dispatch)
      .def(py::init<ExpertDispatch&>(), "inner"_a, py::keep_alive<1, 2>())
      .def("start", &RoutingTap::start, "capacity_ids"_a)
      .def("stop", &RoutingTap::stop)
      .def("clear", &RoutingTap::clear)
      .def("take", &take_tapped);
  py::class_<Step>(module, "Step")
      .def(py::init(&make_step), py::kw_only(), "token_ids"_a, "tokens"_a, "outputs"_a,
           "outputs_count"_a, "sampling"_a, "page_table"_a, "sequence_index"_a, "positions"_a,
           "sequences"_a, "max_pages"_a, "kv"_a, "rotations"_a, py::keep_alive<1, 12>());
  py::class_<Program> program(module, "Program");
  program.def(py::init(&make_program), "buffers"_a, "experts"_a, py::keep_alive<1, 3>())
      .def_property_readonly("ops_count", &Program::ops_count)
      .def_property_readonly("arena_bytes", &Program::arena_bytes)
      .def_property_readonly("finished_ops_count", &Program::finished_ops_count)
      .def(
          "buffer",
          [](const Program& self, BufferIndex index) {
            return reinterpret_cast<Address>(self.buffer(index));
          },
          "index"_a)
      .def(
          "prepare", [](Program& self, const Step& step) { self.prepare(step.call); }, "step"_a)
      .def(
          "run",
          [](Program& self, Executor& executor, const Step& step, std::size_t first,
             std::size_t last) { self.run(executor, step.call, first, last); },
          py::call_guard<py::gil_scoped_release>(), "executor"_a, "step"_a, "first"_a, "last"_a);
  add_row_ops(program);
  add_attention_ops(program);
  add_expert_ops(program);
}
