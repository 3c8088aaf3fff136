#include "isa_avx2.h"
#include "make_kernels.h"

namespace freetoken::exec {

const Kernels* avx2_kernels() {
  static const Kernels kTable = make_kernels<Avx2Isa>(generic_table<Avx2Isa>());
  return &kTable;
}

}  // namespace freetoken::exec
