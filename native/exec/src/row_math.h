// Operations on one row of activations that every instruction set computes in the same order.
#pragma once
#include <cstddef>

#include "bf16.h"
#include "vector_math.h"

namespace freetoken::exec {
namespace {

// y = silu(gate) * up, rounded to bf16.
template <class Isa>
void silu_product(const float* gate, const float* up, std::size_t size, Bf16* y) {
  for (std::size_t i = 0; i < size; i += 16) {
    const auto g = load_first<Isa>(gate + i, size - i);
    const auto e = exponential<Isa>(Isa::sub(Isa::zero(), g));
    const auto silu = Isa::div(g, Isa::add(Isa::set1(1.0F), e));
    store_bf16<Isa>(Isa::mul(silu, load_first<Isa>(up + i, size - i)), y + i, size - i);
  }
}

}  // namespace
}  // namespace freetoken::exec
