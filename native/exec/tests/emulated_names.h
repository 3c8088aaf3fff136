// The kernels' sources under names of their own, beside the real ones. Before any kernel.
#pragma once

#define avx512_kernels emulated_avx512_kernels
#define avx512_vnni_kernels emulated_avx512_vnni_kernels
#define avx512_bf16_kernels emulated_avx512_bf16_kernels
#define avx_vnni_kernels emulated_avx_vnni_kernels
#define amx_kernels emulated_amx_kernels
