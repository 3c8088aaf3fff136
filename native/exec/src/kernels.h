// The table of kernels that one instruction set provides. The executor knows no vector type: it
// packs activations, hands out tiles and calls through this table.
#pragma once
#include <cstddef>
#include <cstdint>

#include "bf16.h"
#include "row_ops.h"
#include "weight_format.h"

namespace freetoken::exec {

// Activations of a few tokens ("a panel"), arranged the way a product reads them.
struct PanelKernels {
  std::size_t (*bytes)(std::size_t columns, int width);
  // rows[0..width) -> one panel; columns beyond `columns` read as zero.
  void (*pack)(const Bf16* const* rows, int width, std::size_t columns, std::byte* panel);
  // values[block][token][16], rounded to bf16, into the columns first_column .. of a panel of
  // `columns` columns (a multiple of 16). first_column is a multiple of 32, and so is the number
  // of columns put unless they are the panel's last.
  void (*put)(const float* values, int blocks, int width, std::size_t first_column,
              std::size_t columns, std::byte* panel);
};

struct DotPanel {
  const std::byte* data;
  int width;
  float* acc;  // [block][token][16]
};

// Products of one kind of weights. Weights come in blocks of 16 rows.
struct ProductKernels {
  PanelKernels panel;
  int max_width;  // tokens of the widest panel
  // acc = row sums of `blocks` consecutive blocks for every panel's tokens; weights are decoded
  // once for all panels where decoding costs. The order of a row's sum is that of its columns and
  // does not depend on the number of blocks, panels or tokens.
  void (*dot)(const WeightFormat& format, const std::byte* weights, int blocks, std::size_t columns,
              const DotPanel* panels, int panels_count);
};

enum class Activation : std::uint8_t { kSilu, kGelu, kGeluTanh, kSwigluOai };

// How gate and up become one. A limit above 0 clamps: gate to at most it, up to +-it.
struct GluSpec {
  Activation activation = Activation::kSilu;
  float limit = 0.0F;
  float alpha = 1.702F;  // kSwigluOai: (up + 1) * gate * sigmoid(alpha * gate)
};

struct GluTile {
  const float* acc;  // [gate block, up block, gate block ...][token][16]
  int block_pairs;
  int width;
  float gate_scale, up_scale;
  const float* gate_bias;  // of the tile's first row, or null
  const float* up_bias;
  float* values;  // [block pair][token][16]; may be acc itself
};

// One tile of paged attention: queries that share a kv head and a sequence, keys
// [key_begin, key_end) of that sequence, key_begin on a page boundary.
struct AttentionTile {
  const float* q;              // [queries][padded_size], zero padded
  const std::int32_t* q_ends;  // [queries] query i sees keys [0, q_ends[i])
  std::ptrdiff_t queries;
  const Bf16* k_pages;  // of this kv head: element 0 of page 0
  const Bf16* v_pages;
  const std::int32_t* page_row;  // page numbers of the sequence
  std::size_t page_stride;       // elements from a page to the next
  std::ptrdiff_t head_size;
  std::ptrdiff_t padded_size;  // head_size rounded up to 16
  std::ptrdiff_t page_tokens;
  float scale;
  std::int64_t key_begin;
  std::int64_t key_end;
  float* scores;  // [queries][page_tokens rounded up to 16]
  // Partial softmax of each query over this tile's keys.
  float* maximum;  // [queries]
  float* sum;      // [queries]
  float* output;   // [queries][padded_size], not yet divided by sum
};

// Products by kind of weights. `exact` has bf16 activations and is complete; `fast` has int8
// activations and no entry where that makes no sense. (Plain arrays: an inline function here could
// be emitted with one instruction set's flags and run on another.)
struct ProductTable {
  const ProductKernels* exact[kWeightKinds];
  const ProductKernels* fast[kWeightKinds];
};

struct Kernels {
  const char* isa;
  ProductTable products;
  void (*glu)(const GluSpec& spec, const GluTile& tile);
  void (*rms_norm)(const float* x, const float* weight, std::size_t size, float eps, Bf16* y);
  // y = silu(gate) * up of one row
  void (*silu_product)(const float* gate, const float* up, std::size_t size, Bf16* y);
  void (*attend)(const AttentionTile& tile);
  // total <- total (+) part, for `queries` queries, in the order the parts are given.
  void (*attend_merge)(const AttentionTile& total, const AttentionTile& part);
  // out[query][head_size] = output / sum.
  void (*attend_finish)(const AttentionTile& total, Bf16* out);
  RowKernels rows;
  // Reads every byte once; the result depends on them so that the reads stay.
  std::uint64_t (*stream_read)(const std::byte* data, std::size_t length_bytes);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();
// slow_subnormals: multiplying a subnormal number costs an assist, as it does on Intel.
const Kernels* avx2_kernels_for(bool slow_subnormals);
const Kernels* avx_vnni_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_vnni_kernels();
const Kernels* avx512_bf16_kernels();
const Kernels* amx_kernels();

}  // namespace freetoken::exec
