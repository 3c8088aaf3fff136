// What stands between the two products of an expert: act(gate) * up, in every instruction set.
#pragma once
#include <cstddef>

#include "kernels.h"
#include "vector_math.h"

namespace freetoken::exec {
namespace {

template <class Isa>
struct Glu {
  using F = typename Isa::F;

  static F sigmoid(F x) {
    const F e = exponential<Isa>(Isa::sub(Isa::zero(), x));
    return Isa::div(Isa::set1(1.0F), Isa::add(Isa::set1(1.0F), e));
  }

  // erf(x) by Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26; absolute error
  // below 1.5e-7.
  static F erf(F x) {
    const F magnitude = Isa::max(x, Isa::sub(Isa::zero(), x));
    const F t =
        Isa::div(Isa::set1(1.0F), Isa::fma(magnitude, Isa::set1(0.3275911F), Isa::set1(1.0F)));
    F p = Isa::set1(1.061405429F);
    p = Isa::fma(p, t, Isa::set1(-1.453152027F));
    p = Isa::fma(p, t, Isa::set1(1.421413741F));
    p = Isa::fma(p, t, Isa::set1(-0.284496736F));
    p = Isa::fma(p, t, Isa::set1(0.254829592F));
    const F e = exponential<Isa>(Isa::sub(Isa::zero(), Isa::mul(magnitude, magnitude)));
    const F positive = Isa::sub(Isa::set1(1.0F), Isa::mul(Isa::mul(p, t), e));
    // The sign of x without comparing: x / |x|, and 0 stays 0.
    const F sign = Isa::div(x, Isa::max(magnitude, Isa::set1(1e-30F)));
    return Isa::mul(sign, positive);
  }

  static F gelu(F x) {
    const F inner = erf(Isa::mul(x, Isa::set1(0.70710678118654752F)));
    return Isa::mul(Isa::mul(Isa::set1(0.5F), x), Isa::add(Isa::set1(1.0F), inner));
  }

  // 0.5 x (1 + tanh(u)) = x sigmoid(2 u)
  static F gelu_tanh(F x) {
    const F cube = Isa::mul(Isa::mul(x, x), x);
    const F u = Isa::mul(Isa::set1(0.79788456080286536F), Isa::fma(Isa::set1(0.044715F), cube, x));
    return Isa::mul(x, sigmoid(Isa::add(u, u)));
  }

  static F combine(const GluSpec& spec, F gate, F up) {
    if (spec.limit > 0) {
      const F limit = Isa::set1(spec.limit);
      // The clamped value is the second operand: a NaN stays one.
      gate = Isa::min(limit, gate);
      up = Isa::max(Isa::set1(-spec.limit), Isa::min(limit, up));
    }
    switch (spec.activation) {
      case Activation::kGelu:
        return Isa::mul(gelu(gate), up);
      case Activation::kGeluTanh:
        return Isa::mul(gelu_tanh(gate), up);
      case Activation::kSwigluOai: {
        const F glu = Isa::mul(gate, sigmoid(Isa::mul(Isa::set1(spec.alpha), gate)));
        return Isa::mul(Isa::add(up, Isa::set1(1.0F)), glu);
      }
      case Activation::kSilu:
        break;
    }
    const F e = exponential<Isa>(Isa::sub(Isa::zero(), gate));
    return Isa::mul(Isa::div(gate, Isa::add(Isa::set1(1.0F), e)), up);
  }

  static void run(const GluSpec& spec, const GluTile& tile) {
    const auto tokens = static_cast<std::size_t>(tile.width);
    const F gate_scale = Isa::set1(tile.gate_scale);
    const F up_scale = Isa::set1(tile.up_scale);
    const float* acc = tile.acc;
    float* values = tile.values;
    for (int pair = 0; pair < tile.block_pairs; ++pair, acc += 2 * tokens * kRowsPerBlock) {
      const std::size_t row = static_cast<std::size_t>(pair) * kRowsPerBlock;
      const F gate_bias = tile.gate_bias != nullptr ? Isa::load(tile.gate_bias + row) : Isa::zero();
      const F up_bias = tile.up_bias != nullptr ? Isa::load(tile.up_bias + row) : Isa::zero();
      for (std::size_t token = 0; token < tokens; ++token, values += kRowsPerBlock) {
        const F gate = Isa::fma(Isa::load(acc + token * kRowsPerBlock), gate_scale, gate_bias);
        const F up = Isa::fma(Isa::load(acc + (tokens + token) * kRowsPerBlock), up_scale, up_bias);
        Isa::store(values, combine(spec, gate, up));
      }
    }
  }
};

}  // namespace
}  // namespace freetoken::exec
