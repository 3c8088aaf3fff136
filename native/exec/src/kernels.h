// The table of kernels that one instruction set provides. The executor knows no vector type: it
// packs activations, hands out tiles and calls through this table.
#pragma once
#include <cstddef>
#include <cstdint>

#include "bf16.h"

namespace freetoken::exec {

// What a weight format brings. Weights come in blocks of 16 rows; activations come in panels of
// up to `max_width` tokens, interleaved the way `dot` reads them.
struct FormatKernels {
  std::size_t (*block_bytes)(std::size_t columns);
  int max_width;
  std::size_t (*panel_bytes)(std::size_t columns, int width);
  // rows[0..width) -> one panel; columns beyond `columns` read as zero.
  void (*pack_panel)(const Bf16* const* rows, int width, std::size_t columns, std::byte* panel);
  // acc[block][token][16] = row sums of `blocks` consecutive blocks for the panel's tokens: one
  // accumulator per (row, token), columns strictly in order.
  void (*dot)(const std::byte* weights, int blocks, std::size_t columns, const std::byte* panel,
              int width, float* acc);
  // acc holds gate, up, gate, up ... blocks: silu(gate) * up, rounded to bf16, into rows
  // first_row .. of a panel (the rows become the columns of the next product).
  void (*swiglu)(const float* acc, int block_pairs, int width, std::size_t first_row,
                 std::byte* panel);
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

struct Kernels {
  const char* isa;
  FormatKernels bf16;
  void (*rms_norm)(const float* x, const float* weight, std::size_t size, float eps, Bf16* y);
  void (*attend)(const AttentionTile& tile);
  // total <- total (+) part, for `queries` queries, in the order the parts are given.
  void (*attend_merge)(const AttentionTile& total, const AttentionTile& part);
  // out[query][head_size] = output / sum.
  void (*attend_finish)(const AttentionTile& total, Bf16* out);
  // Reads every byte once; the result depends on them so that the reads stay.
  std::uint64_t (*stream_read)(const std::byte* data, std::size_t length_bytes);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_bf16_kernels();

}  // namespace freetoken::exec
