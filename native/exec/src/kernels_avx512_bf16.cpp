#include "isa_avx512_bf16.h"
#include "make_kernels.h"

namespace freetoken::exec {

const Kernels* avx512_bf16_kernels() {
  static const Kernels kTable = make_kernels<Avx512Bf16Isa>(generic_table<Avx512Bf16Isa>());
  return &kTable;
}

}  // namespace freetoken::exec
