// Functions over sixteen lanes that every instruction set computes with the same operations.
#pragma once
#include <cstddef>
#include <cstring>

#include "bf16.h"

namespace freetoken::exec {
namespace {

// e^x with a relative error below 2e-7 for x in [-87, 88]; x is clamped to that range.
template <class Isa>
typename Isa::F exponential(typename Isa::F x) {
  const auto magic = Isa::set1(12582912.0F);  // 1.5 * 2^23: adding it rounds to an integer
  x = Isa::max(Isa::set1(-87.0F), Isa::min(Isa::set1(88.0F), x));
  const auto shifted = Isa::fma(x, Isa::set1(1.44269504088896341F), magic);
  const auto n = Isa::sub(shifted, magic);
  // ln 2 in two parts, so that x - n ln 2 loses nothing.
  auto r = Isa::fma(n, Isa::set1(-0.693359375F), x);
  r = Isa::fma(n, Isa::set1(2.12194440e-4F), r);
  auto p = Isa::set1(1.9875691500e-4F);
  p = Isa::fma(p, r, Isa::set1(1.3981999507e-3F));
  p = Isa::fma(p, r, Isa::set1(8.3334519073e-3F));
  p = Isa::fma(p, r, Isa::set1(4.1665795894e-2F));
  p = Isa::fma(p, r, Isa::set1(1.6666665459e-1F));
  p = Isa::fma(p, r, Isa::set1(5.0000001201e-1F));
  p = Isa::add(Isa::fma(p, Isa::mul(r, r), r), Isa::set1(1.0F));
  return Isa::mul(p, Isa::power_of_two(shifted));
}

template <class Isa>
float exponential_scalar(float x) {
  float lanes[16];
  Isa::store(lanes, exponential<Isa>(Isa::set1(x)));
  return lanes[0];
}

// The first `count` (1..16) of sixteen lanes; the others are zero.
template <class Isa>
typename Isa::F load_first(const float* p, std::size_t count) {
  if (count >= 16) return Isa::load(p);
  float lanes[16] = {};
  std::memcpy(lanes, p, count * sizeof(float));
  return Isa::load(lanes);
}

template <class Isa>
typename Isa::F load_first_bf16(const Bf16* p, std::size_t count) {
  if (count >= 16) return Isa::load_bf16(p);
  Bf16 lanes[16] = {};
  std::memcpy(lanes, p, count * sizeof(Bf16));
  return Isa::load_bf16(lanes);
}

template <class Isa>
void store_bf16(typename Isa::F a, Bf16* out, std::size_t count) {
  float lanes[16];
  Isa::store(lanes, a);
  for (std::size_t i = 0; i < count && i < 16; ++i) out[i] = float_to_bf16(lanes[i]);
}

// Root mean square norm of one row. Sixteen running sums in a fixed order, then a fixed tree.
template <class Isa>
void rms_norm(const float* x, const float* weight, std::size_t size, float eps, Bf16* y) {
  auto squares = Isa::zero();
  for (std::size_t i = 0; i < size; i += 16) {
    const auto v = load_first<Isa>(x + i, size - i);
    squares = Isa::fma(v, v, squares);
  }
  const float mean = Isa::reduce_add(squares) / static_cast<float>(size);
  const float inverse = 1.0F / __builtin_sqrtf(mean + eps);
  for (std::size_t i = 0; i < size; i += 16) {
    const auto scaled = Isa::mul(load_first<Isa>(x + i, size - i), Isa::set1(inverse));
    store_bf16<Isa>(Isa::mul(scaled, load_first<Isa>(weight + i, size - i)), y + i, size - i);
  }
}

}  // namespace
}  // namespace freetoken::exec
