// Instantiates every kernel for one instruction set.
#pragma once
#include "attention.h"
#include "format_bf16.h"
#include "kernels.h"
#include "vector_math.h"

namespace freetoken::exec {
namespace {

template <class Isa>
constexpr Kernels make_kernels() {
  return {.isa = Isa::kName,
          .bf16 = Bf16Format<Isa>::table(),
          .rms_norm = rms_norm<Isa>,
          .attend = Attention<Isa>::attend,
          .attend_merge = Attention<Isa>::merge,
          .attend_finish = Attention<Isa>::finish,
          .stream_read = Isa::stream_read};
}

}  // namespace
}  // namespace freetoken::exec
