// One mixture-of-experts layer on ggml's CPU backend, behind a C interface.
//
// The graph is the one that llama.cpp builds for such a layer: mul_mat_id of gate and up, swiglu,
// mul_mat_id of down, the weighting and the sum over the experts. Weights lie in the buffer type
// that llama.cpp would choose: the first of the CPU's extra buffer types (repacked forms) that
// supports the operation, else plain memory. Times are taken here.

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

namespace {

double now_s() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

ggml_type type_of(const char* name) {
  for (int i = 0; i < GGML_TYPE_COUNT; i++) {
    const auto type = static_cast<ggml_type>(i);
    const char* known = ggml_type_name(type);
    if (known != nullptr && std::strcmp(known, name) == 0) return type;
  }
  return GGML_TYPE_COUNT;
}

ggml_init_params no_memory(size_t tensors, bool graph) {
  const size_t bytes = ggml_tensor_overhead() * tensors + (graph ? ggml_graph_overhead() : 0);
  return {bytes, nullptr, true};
}

// Experts that differ; the others repeat them, at addresses of their own.
constexpr int kDistinctExperts = 4;

struct Layer {
  ggml_backend_t backend = nullptr;
  ggml_context* context = nullptr;
  ggml_backend_buffer_t buffer = nullptr;
  ggml_tensor* gate = nullptr;
  ggml_tensor* up = nullptr;
  ggml_tensor* down = nullptr;
  ggml_type type = GGML_TYPE_COUNT;
  int64_t hidden = 0, inner = 0, experts = 0, top_k = 0;
  std::string buffer_name;
  std::vector<float> gate_up_values, down_values;  // what the codes mean, distinct experts only

  Layer() = default;
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;
  ~Layer() {
    if (buffer != nullptr) ggml_backend_buffer_free(buffer);
    if (context != nullptr) ggml_free(context);
    if (backend != nullptr) ggml_backend_free(backend);
  }
};

struct Batch {
  Layer* layer = nullptr;
  ggml_context* context = nullptr;
  ggml_gallocr_t allocator = nullptr;
  ggml_cgraph* graph = nullptr;
  ggml_tensor* x = nullptr;
  ggml_tensor* ids = nullptr;
  ggml_tensor* weights = nullptr;
  ggml_tensor* out = nullptr;
  int64_t tokens = 0;
  std::vector<int32_t> routes;
  size_t next = 0;

  Batch() = default;
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;
  ~Batch() {
    if (allocator != nullptr) ggml_gallocr_free(allocator);
    if (context != nullptr) ggml_free(context);
  }

  void run_next() {
    const size_t size = static_cast<size_t>(tokens * layer->top_k);
    std::memcpy(ids->data, routes.data() + next * size, size * sizeof(int32_t));
    next = (next + 1) % (routes.size() / size);
    ggml_backend_graph_compute(layer->backend, graph);
  }
};

// As llama.cpp asks: does the device take this operation with the weights in that buffer type?
bool supports(ggml_backend_dev_t device, ggml_backend_buffer_type_t type, const Layer& layer) {
  ggml_context* context = ggml_init(no_memory(8, false));
  ggml_tensor* w =
      ggml_new_tensor_3d(context, layer.type, layer.hidden, layer.inner, layer.experts);
  ggml_tensor* x = ggml_new_tensor_3d(context, GGML_TYPE_F32, layer.hidden, 1, 512);
  ggml_tensor* ids = ggml_new_tensor_2d(context, GGML_TYPE_I32, layer.top_k, 512);
  ggml_tensor* product = ggml_mul_mat_id(context, w, x, ids);
  w->buffer = ggml_backend_buft_alloc_buffer(type, 0);
  const bool taken = ggml_backend_dev_supports_op(device, product);
  ggml_backend_buffer_free(w->buffer);
  ggml_free(context);
  return taken;
}

ggml_backend_buffer_type_t chosen_buffer_type(ggml_backend_dev_t device, const Layer& layer) {
  ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(device);
  const auto extra = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
      ggml_backend_reg_get_proc_address(registry, "ggml_backend_dev_get_extra_bufts"));
  if (extra != nullptr) {
    for (auto* type = extra(device); type != nullptr && *type != nullptr; type++) {
      if (supports(device, *type, layer)) return *type;
    }
  }
  return ggml_backend_cpu_buffer_type();
}

void fill(ggml_tensor* tensor, std::mt19937& random, std::vector<float>* values) {
  std::normal_distribution<float> normal(0.0F, 0.02F);
  const int64_t rows = tensor->ne[1] * kDistinctExperts;
  std::vector<float> source(static_cast<size_t>(rows * tensor->ne[0]));
  for (float& value : source) value = normal(random);
  const size_t all_bytes = ggml_nbytes(tensor);
  const size_t distinct_bytes = all_bytes / static_cast<size_t>(tensor->ne[2]) * kDistinctExperts;
  std::vector<char> codes(all_bytes);
  ggml_quantize_chunk(tensor->type, source.data(), codes.data(), 0, rows, tensor->ne[0], nullptr);
  for (size_t at = distinct_bytes; at < all_bytes; at += distinct_bytes) {
    std::memcpy(codes.data() + at, codes.data(), std::min(distinct_bytes, all_bytes - at));
  }
  ggml_backend_tensor_set(tensor, codes.data(), 0, all_bytes);
  const size_t before = values->size();
  values->resize(before + source.size());
  const auto* traits = ggml_get_type_traits(tensor->type);
  const auto count = static_cast<int64_t>(source.size());
  if (traits->to_float != nullptr) {
    traits->to_float(codes.data(), values->data() + before, count);
  } else {
    std::copy(source.begin(), source.end(), values->begin() + static_cast<int64_t>(before));
  }
}

double dot(const float* a, const float* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

}  // namespace

extern "C" {

// Weights of one layer of the ggml type `type_name`. Null where ggml has no such type.
Layer* layer_open(const char* type_name, int threads, int hidden, int inner, int experts,
                  int top_k) {
  auto* layer = new Layer;
  layer->type = type_of(type_name);
  if (layer->type == GGML_TYPE_COUNT) {
    delete layer;
    return nullptr;
  }
  layer->hidden = hidden, layer->inner = inner, layer->experts = experts, layer->top_k = top_k;
  ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  layer->backend = ggml_backend_dev_init(device, nullptr);
  ggml_backend_cpu_set_n_threads(layer->backend, threads);
  layer->context = ggml_init(no_memory(8, false));
  layer->gate = ggml_new_tensor_3d(layer->context, layer->type, hidden, inner, experts);
  layer->up = ggml_new_tensor_3d(layer->context, layer->type, hidden, inner, experts);
  layer->down = ggml_new_tensor_3d(layer->context, layer->type, inner, hidden, experts);
  ggml_backend_buffer_type_t type = chosen_buffer_type(device, *layer);
  layer->buffer_name = ggml_backend_buft_name(type);
  layer->buffer = ggml_backend_alloc_ctx_tensors_from_buft(layer->context, type);
  if (layer->buffer == nullptr) {
    delete layer;
    return nullptr;
  }
  std::mt19937 random(1);
  fill(layer->gate, random, &layer->gate_up_values);
  fill(layer->up, random, &layer->gate_up_values);
  fill(layer->down, random, &layer->down_values);
  return layer;
}

void layer_close(Layer* layer) { delete layer; }

const char* layer_buffer_name(const Layer* layer) { return layer->buffer_name.c_str(); }

// A batch of `tokens`; `routes` int32 [count, tokens, top_k] are taken in turn, one per call.
Batch* batch_open(Layer* layer, int tokens, const int32_t* routes, int count) {
  auto* batch = new Batch;
  batch->layer = layer;
  batch->tokens = tokens;
  batch->routes.assign(routes, routes + static_cast<int64_t>(count) * tokens * layer->top_k);
  ggml_context* context = batch->context = ggml_init(no_memory(64, true));
  const int64_t k = layer->top_k;
  batch->x = ggml_new_tensor_3d(context, GGML_TYPE_F32, layer->hidden, 1, tokens);
  batch->ids = ggml_new_tensor_2d(context, GGML_TYPE_I32, k, tokens);
  batch->weights = ggml_new_tensor_3d(context, GGML_TYPE_F32, 1, k, tokens);
  for (ggml_tensor* input : {batch->x, batch->ids, batch->weights}) ggml_set_input(input);
  ggml_tensor* up = ggml_mul_mat_id(context, layer->up, batch->x, batch->ids);
  ggml_tensor* gate = ggml_mul_mat_id(context, layer->gate, batch->x, batch->ids);
  ggml_tensor* inner = ggml_swiglu_split(context, gate, up);
  ggml_tensor* y = ggml_mul_mat_id(context, layer->down, inner, batch->ids);
  y = ggml_mul(context, y, batch->weights);
  for (int64_t i = 0; i < k; i++) {
    const size_t offset = static_cast<size_t>(i) * y->nb[1];
    ggml_tensor* part = ggml_view_2d(context, y, layer->hidden, tokens, y->nb[2], offset);
    batch->out = batch->out == nullptr ? part : ggml_add(context, batch->out, part);
  }
  ggml_set_output(batch->out);
  batch->graph = ggml_new_graph(context);
  ggml_build_forward_expand(batch->graph, batch->out);
  batch->allocator = ggml_gallocr_new(ggml_backend_get_default_buffer_type(layer->backend));
  ggml_gallocr_alloc_graph(batch->allocator, batch->graph);
  std::mt19937 random(2);
  std::normal_distribution<float> normal(0.0F, 0.3F);
  std::vector<float> x(static_cast<size_t>(layer->hidden) * static_cast<size_t>(tokens));
  for (float& value : x) value = normal(random);
  ggml_backend_tensor_set(batch->x, x.data(), 0, x.size() * sizeof(float));
  const std::vector<float> weights(static_cast<size_t>(k * tokens), 1.0F / static_cast<float>(k));
  ggml_backend_tensor_set(batch->weights, weights.data(), 0, weights.size() * sizeof(float));
  return batch;
}

void batch_close(Batch* batch) { delete batch; }

// Calls for at least `seconds`; tells how many and how long.
void batch_burst(Batch* batch, double seconds, int64_t* calls, double* elapsed_s) {
  const double start_s = now_s();
  *calls = 0;
  do {
    batch->run_next();
    *calls += 1;
    *elapsed_s = now_s() - start_s;
  } while (*elapsed_s < seconds);
}

// ||y - reference|| / ||reference|| of the first token of a call, reference: the meaning of the
// codes in float64 with activations as they are.
double batch_error(Batch* batch) {
  const Layer& layer = *batch->layer;
  const int32_t* ids =
      batch->routes.data() + batch->next * static_cast<size_t>(batch->tokens * layer.top_k);
  std::vector<float> x(static_cast<size_t>(layer.hidden)), found(x.size());
  std::vector<float> inner(static_cast<size_t>(layer.inner));
  std::vector<double> wanted(x.size());
  ggml_backend_tensor_get(batch->x, x.data(), 0, x.size() * sizeof(float));
  batch->run_next();
  ggml_backend_tensor_get(batch->out, found.data(), 0, found.size() * sizeof(float));
  const float* up_values = layer.gate_up_values.data() + layer.gate_up_values.size() / 2;
  for (int64_t j = 0; j < layer.top_k; j++) {
    const int64_t first = (ids[j] % kDistinctExperts) * layer.hidden * layer.inner;
    for (int64_t row = 0; row < layer.inner; row++) {
      const int64_t at = first + row * layer.hidden;
      const double gate = dot(layer.gate_up_values.data() + at, x.data(), layer.hidden);
      const double up = dot(up_values + at, x.data(), layer.hidden);
      inner[static_cast<size_t>(row)] = static_cast<float>(gate / (1 + std::exp(-gate)) * up);
    }
    for (int64_t row = 0; row < layer.hidden; row++) {
      const float* weights = layer.down_values.data() + first + row * layer.inner;
      wanted[static_cast<size_t>(row)] +=
          dot(weights, inner.data(), layer.inner) / static_cast<double>(layer.top_k);
    }
  }
  double error = 0, norm = 0;
  for (size_t i = 0; i < wanted.size(); i++) {
    error += (found[i] - wanted[i]) * (found[i] - wanted[i]);
    norm += wanted[i] * wanted[i];
  }
  return std::sqrt(error / norm);
}

}  // extern "C"
