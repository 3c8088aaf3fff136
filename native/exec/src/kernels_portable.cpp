#include "isa_portable.h"
#include "make_kernels.h"

namespace freetoken::exec {

const Kernels* portable_kernels() {
  static constexpr Kernels kTable = make_kernels<PortableIsa>();
  return &kTable;
}

}  // namespace freetoken::exec
