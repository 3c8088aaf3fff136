// Softmax attention over bf16 key and value pages, in fixed order per (query, page).
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "vector_math.h"

namespace freetoken::exec {
namespace {

template <class Isa>
struct Attention {
  using F = typename Isa::F;
  // Queries that share one pass over a page's keys or values, and rows of 16 output elements
  // held in registers meanwhile.
  static constexpr std::ptrdiff_t kQueries = 4;

  static std::ptrdiff_t scores_stride(const AttentionTile& tile) {
    return (tile.page_tokens + 15) / 16 * 16;
  }

  static std::ptrdiff_t keys_of(const AttentionTile& tile, std::ptrdiff_t query,
                                std::int64_t page_begin) {
    std::int64_t count = tile.q_ends[query] - page_begin;
    if (tile.key_end - page_begin < count) count = tile.key_end - page_begin;
    if (tile.page_tokens < count) count = tile.page_tokens;
    return count < 0 ? 0 : static_cast<std::ptrdiff_t>(count);
  }

  // scores[query][key] = scale * (q . k), for Count queries from `first` and `keys` keys.
  template <std::ptrdiff_t Count>
  static void scores(const AttentionTile& tile, std::ptrdiff_t first, const Bf16* k_page,
                     std::ptrdiff_t keys) {
    const std::ptrdiff_t stride = scores_stride(tile);
    const float* q = tile.q + first * tile.padded_size;
    float* out = tile.scores + first * stride;
    for (std::ptrdiff_t key = 0; key < keys; ++key) {
      const Bf16* k = k_page + key * tile.head_size;
      F acc[Count];
#pragma GCC unroll 4
      for (std::ptrdiff_t i = 0; i < Count; ++i) acc[i] = Isa::zero();
      for (std::ptrdiff_t d = 0; d < tile.head_size; d += 16) {
        const F chunk = load_first_bf16<Isa>(k + d, static_cast<std::size_t>(tile.head_size - d));
#pragma GCC unroll 4
        for (std::ptrdiff_t i = 0; i < Count; ++i) {
          acc[i] = Isa::fma(Isa::load(q + i * tile.padded_size + d), chunk, acc[i]);
        }
      }
#pragma GCC unroll 4
      for (std::ptrdiff_t i = 0; i < Count; ++i) {
        out[i * stride + key] = Isa::reduce_add(acc[i]) * tile.scale;
      }
    }
  }

  // Scores -> exp(score - maximum), zero beyond `keys`; maximum and sum move on. Returns the
  // factor that the query's earlier output has to be multiplied with.
  static float softmax(const AttentionTile& tile, std::ptrdiff_t query, std::ptrdiff_t keys) {
    const std::ptrdiff_t stride = scores_stride(tile);
    float* s = tile.scores + query * stride;
    float top = tile.maximum[query];
    for (std::ptrdiff_t key = 0; key < keys; ++key) top = s[key] > top ? s[key] : top;
    const float rescale = exponential_scalar<Isa>(tile.maximum[query] - top);
    F sum = Isa::zero();
    for (std::ptrdiff_t key = 0; key < keys; key += 16) {
      float lanes[16] = {};
      const std::ptrdiff_t valid = keys - key < 16 ? keys - key : 16;
      Isa::store(lanes, exponential<Isa>(Isa::sub(Isa::load(s + key), Isa::set1(top))));
      for (std::ptrdiff_t i = valid; i < 16; ++i) lanes[i] = 0.0F;
      const F weights = Isa::load(lanes);
      Isa::store(s + key, weights);
      sum = Isa::add(sum, weights);
    }
    tile.sum[query] = tile.sum[query] * rescale + Isa::reduce_add(sum);
    tile.maximum[query] = top;
    return rescale;
  }

  // output[query] = output[query] * rescale + sum over keys, in order, of weight * v.
  template <std::ptrdiff_t Count>
  static void values(const AttentionTile& tile, std::ptrdiff_t first, const Bf16* v_page,
                     const std::ptrdiff_t* keys, const float* rescale) {
    const std::ptrdiff_t stride = scores_stride(tile);
    const float* weights = tile.scores + first * stride;
    float* out = tile.output + first * tile.padded_size;
    std::ptrdiff_t shortest = keys[0];
    for (std::ptrdiff_t i = 1; i < Count; ++i) shortest = keys[i] < shortest ? keys[i] : shortest;
    for (std::ptrdiff_t d = 0; d < tile.head_size; d += 16) {
      const auto width = static_cast<std::size_t>(tile.head_size - d);
      const auto row = [&](std::ptrdiff_t key) {
        return load_first_bf16<Isa>(v_page + key * tile.head_size + d, width);
      };
      F acc[Count];
#pragma GCC unroll 4
      for (std::ptrdiff_t i = 0; i < Count; ++i) {
        acc[i] = Isa::mul(Isa::load(out + i * tile.padded_size + d), Isa::set1(rescale[i]));
      }
      for (std::ptrdiff_t key = 0; key < shortest; ++key) {
        const F v = row(key);
#pragma GCC unroll 4
        for (std::ptrdiff_t i = 0; i < Count; ++i) {
          acc[i] = Isa::fma(Isa::set1(weights[i * stride + key]), v, acc[i]);
        }
      }
      // A key that only some queries may see is left out of the others, not given weight zero:
      // what lies there may be infinite.
      for (std::ptrdiff_t i = 0; i < Count; ++i) {
        for (std::ptrdiff_t key = shortest; key < keys[i]; ++key) {
          acc[i] = Isa::fma(Isa::set1(weights[i * stride + key]), row(key), acc[i]);
        }
        Isa::store(out + i * tile.padded_size + d, acc[i]);
      }
    }
  }

  template <std::ptrdiff_t Count>
  static void page(const AttentionTile& tile, std::ptrdiff_t first, std::int64_t page_begin) {
    std::ptrdiff_t keys[Count];
    std::ptrdiff_t longest = 0;
    for (std::ptrdiff_t i = 0; i < Count; ++i) {
      keys[i] = keys_of(tile, first + i, page_begin);
      longest = keys[i] > longest ? keys[i] : longest;
    }
    if (longest == 0) return;
    const auto number = static_cast<std::size_t>(tile.page_row[page_begin / tile.page_tokens]);
    scores<Count>(tile, first, tile.k_pages + number * tile.page_stride, longest);
    float rescale[Count];
    for (std::ptrdiff_t i = 0; i < Count; ++i) {
      rescale[i] = keys[i] > 0 ? softmax(tile, first + i, keys[i]) : 1.0F;
    }
    values<Count>(tile, first, tile.v_pages + number * tile.page_stride, keys, rescale);
  }

  static void attend(const AttentionTile& tile) {
    for (std::ptrdiff_t i = 0; i < tile.queries; ++i) {
      tile.maximum[i] = -3.0e38F;
      tile.sum[i] = 0.0F;
    }
    for (std::ptrdiff_t i = 0; i < tile.queries * tile.padded_size; ++i) tile.output[i] = 0.0F;
    for (std::int64_t begin = tile.key_begin; begin < tile.key_end; begin += tile.page_tokens) {
      std::ptrdiff_t query = 0;
      for (; query + kQueries <= tile.queries; query += kQueries)
        page<kQueries>(tile, query, begin);
      for (; query + 2 <= tile.queries; query += 2) page<2>(tile, query, begin);
      for (; query < tile.queries; ++query) page<1>(tile, query, begin);
    }
  }

  static void merge(const AttentionTile& total, const AttentionTile& part) {
    for (std::ptrdiff_t i = 0; i < total.queries; ++i) {
      if (part.sum[i] == 0.0F) continue;  // the query sees none of this part's keys
      const float top = part.maximum[i] > total.maximum[i] ? part.maximum[i] : total.maximum[i];
      const float keep = exponential_scalar<Isa>(total.maximum[i] - top);
      const float gain = exponential_scalar<Isa>(part.maximum[i] - top);
      total.sum[i] = total.sum[i] * keep + part.sum[i] * gain;
      total.maximum[i] = top;
      for (std::ptrdiff_t d = 0; d < total.padded_size; d += 16) {
        float* out = total.output + i * total.padded_size + d;
        const float* add = part.output + i * total.padded_size + d;
        const F kept = Isa::mul(Isa::load(out), Isa::set1(keep));
        Isa::store(out, Isa::fma(Isa::load(add), Isa::set1(gain), kept));
      }
    }
  }

  static void finish(const AttentionTile& total, Bf16* out) {
    for (std::ptrdiff_t i = 0; i < total.queries; ++i) {
      for (std::ptrdiff_t d = 0; d < total.head_size; d += 16) {
        const float* o = total.output + i * total.padded_size + d;
        store_bf16<Isa>(Isa::div(Isa::load(o), Isa::set1(total.sum[i])),
                        out + i * total.head_size + d,
                        static_cast<std::size_t>(total.head_size - d));
      }
    }
  }
};

}  // namespace
}  // namespace freetoken::exec
