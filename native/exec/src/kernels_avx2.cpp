#include "avx2_fast.h"
#include "avx2_products.h"
#include "isa_avx2.h"
#include "make_kernels.h"

namespace freetoken::exec {
namespace {

using Mxfp4Products = Avx2Products<NibbleCodec<E2m1Table>>;
using Nvfp4Products = Avx2Products<NibbleCodec<E2m1Table, 16>>;
using SignedProducts = Avx2Products<NibbleCodec<SignedTable>>;
using UnsignedProducts = Avx2Products<NibbleCodec<UnsignedTable>>;
using Int8Products = Avx2Products<Int8Codec, Paired<Int8Codec>>;
using Q6KProducts = Avx2Products<Q6KCodec>;
using Fp8Products = Avx2Products<Fp8Codec, Paired<Fp8Codec>>;
using Fp8HalvesProducts = Avx2Products<Fp8HalvesCodec, Paired<Fp8HalvesCodec>>;

constexpr WeightFormat fixed_format(WeightKind kind, std::uint16_t group) {
  return {.kind = kind, .group = group};
}

constexpr ProductKernels kFp8 =
    Fp8Products::table(Fp8Products::dot<fixed_format(WeightKind::kFp8Block, 1)>);
constexpr ProductKernels kFp8Halves =
    Fp8HalvesProducts::table(Fp8HalvesProducts::dot<fixed_format(WeightKind::kFp8Block, 1)>);
constexpr ProductKernels kMxfp4 =
    Mxfp4Products::table(Mxfp4Products::dot<fixed_format(WeightKind::kMxfp4, 32)>);
constexpr ProductKernels kNvfp4 =
    Nvfp4Products::table(Nvfp4Products::dot<fixed_format(WeightKind::kNvfp4, 16)>);
constexpr ProductKernels kInt4 =
    SignedProducts::table(avx2_integer_dot<WeightKind::kInt4, SignedProducts>);
constexpr ProductKernels kInt8 =
    Int8Products::table(avx2_integer_dot<WeightKind::kInt8, Int8Products>);
constexpr ProductKernels kQ4K =
    UnsignedProducts::table(UnsignedProducts::dot<fixed_format(WeightKind::kQ4K, 32)>);
constexpr ProductKernels kQ6K =
    Q6KProducts::table(Q6KProducts::dot<fixed_format(WeightKind::kQ6K, 16)>);

using FastMxfp4 = Avx2Fast<FastNibbles<true, 32>>;
using FastNvfp4 = Avx2Fast<FastNibbles<true, 16>>;
using FastInt4 = Avx2Fast<FastNibbles<false, 32>>;
using FastPlainInt8 = Avx2Fast<FastInt8>;
using FastSixBits = Avx2Fast<FastQ6K>;

constexpr ProductKernels kFastMxfp4 =
    FastMxfp4::table(FastMxfp4::dot<fixed_format(WeightKind::kMxfp4, 32)>);
constexpr ProductKernels kFastNvfp4 =
    FastNvfp4::table(FastNvfp4::dot<fixed_format(WeightKind::kNvfp4, 16)>);
constexpr ProductKernels kFastInt4 = FastInt4::table(avx2_integer_dot<WeightKind::kInt4, FastInt4>);
constexpr ProductKernels kFastInt8 =
    FastPlainInt8::table(avx2_integer_dot<WeightKind::kInt8, FastPlainInt8>);
constexpr ProductKernels kFastQ4K =
    FastInt4::table(FastInt4::dot<fixed_format(WeightKind::kQ4K, 32)>);
constexpr ProductKernels kFastQ6K =
    FastSixBits::table(FastSixBits::dot<fixed_format(WeightKind::kQ6K, 16)>);

ProductTable make_products(bool slow_subnormals) {
  ProductTable table = generic_table<Avx2Isa>();
  const auto set = [&table](WeightKind kind, const ProductKernels& products) {
    table.exact[static_cast<std::size_t>(kind)] = &products;
  };
  set(WeightKind::kFp8Block, slow_subnormals ? kFp8Halves : kFp8);
  set(WeightKind::kMxfp4, kMxfp4);
  set(WeightKind::kNvfp4, kNvfp4);
  set(WeightKind::kInt4, kInt4);
  set(WeightKind::kInt8, kInt8);
  set(WeightKind::kQ4K, kQ4K);
  set(WeightKind::kQ6K, kQ6K);
  const auto set_fast = [&table](WeightKind kind, const ProductKernels& products) {
    table.fast[static_cast<std::size_t>(kind)] = &products;
  };
  set_fast(WeightKind::kMxfp4, kFastMxfp4);
  set_fast(WeightKind::kNvfp4, kFastNvfp4);
  set_fast(WeightKind::kInt4, kFastInt4);
  set_fast(WeightKind::kInt8, kFastInt8);
  set_fast(WeightKind::kQ4K, kFastQ4K);
  set_fast(WeightKind::kQ6K, kFastQ6K);
  return table;
}

}  // namespace

const Kernels* avx2_kernels_for(bool slow_subnormals) {
  static const Kernels kSlow = make_kernels<Avx2Isa>(make_products(true));
  static const Kernels kFast = make_kernels<Avx2Isa>(make_products(false));
  return slow_subnormals ? &kSlow : &kFast;
}

const Kernels* avx2_kernels() { return avx2_kernels_for(__builtin_cpu_is("intel") != 0); }

}  // namespace freetoken::exec
