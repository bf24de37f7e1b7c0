// Shared by all kernels. Header-free: NVRTC sees this text and nothing else.
// Compiled once per dtype: FFP_BF16 or FFP_FP16. Arithmetic is float32 in registers; rounding to the storage type is to nearest even,
// with the same conversion instructions that PyTorch's own kernels use. fmad stays on, as in PyTorch's build.
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#ifdef FFP_BF16
__device__ __forceinline__ float to_float(u16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ u16 to_half(float f) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(f)); return r; }
__device__ __forceinline__ u32 pack(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
#else
__device__ __forceinline__ float to_float(u16 v) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v)); return r; }
__device__ __forceinline__ float low(u32 v) { return to_float((u16)(v & 0xffffu)); }
__device__ __forceinline__ float high(u32 v) { return to_float((u16)(v >> 16)); }
__device__ __forceinline__ u16 to_half(float f) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(f)); return r; }
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ u32 pack(float lo, float hi) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
#else
__device__ __forceinline__ u32 pack(float lo, float hi) { return (u32)to_half(lo) | ((u32)to_half(hi) << 16); }
#endif
#endif

__device__ __forceinline__ float rounded(float f) { return to_float(to_half(f)); }
