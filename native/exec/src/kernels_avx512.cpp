#include "isa_avx512.h"
#include "make_kernels.h"

namespace freetoken::exec {

const Kernels* avx512_kernels() {
  static constexpr Kernels kTable = make_kernels<Avx512Isa>();
  return &kTable;
}

}  // namespace freetoken::exec
