// out = r(shift + r(rstd * (x - mean)) * m), m = scale, or r(1 + scale) when plus_one.
// The reduction is PyTorch's vectorised LayerNorm, in its order: 128 threads a row as 4 warps, vectors of 4 elements, thread t takes
// vectors t, t + 128, ...; Welford per element; shuffle down 16..1 inside a warp; then warps 2,3 -> 0,1 and 1 -> 0 with Chan's formula.
struct Welford { float mean, m2, n; };

__device__ __forceinline__ Welford welford_add(float v, Welford w) {
  float delta = v - w.mean, n = w.n + 1.f, mean = w.mean + delta * (1.f / n);
  Welford r = {mean, w.m2 + delta * (v - mean), n};
  return r;
}
// Only ever asked to combine equal counts, or one with nothing: the shares are then 1/2, 1 or 0, and which product of `r.mean` the compiler
// fuses into the sum cannot show. (Other widths are refused: there torch's choice would have to be guessed.)
__device__ __forceinline__ Welford welford_combine(Welford b, Welford a) {
  float delta = b.mean - a.mean, n = a.n + b.n;
  Welford r = {0.f, 0.f, n};
  if (n > 0.f) {
    float inverse = 1.f / n, share_a = a.n * inverse, share_b = b.n * inverse;
    r.mean = share_a * a.mean + share_b * b.mean;
    r.m2 = a.m2 + b.m2 + delta * delta * a.n * share_b;
  }
  return r;
}
__device__ __forceinline__ Welford welford_row(Welford w, float* shared) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    Welford b = {__shfl_down_sync(~0u, w.mean, offset), __shfl_down_sync(~0u, w.m2, offset), __shfl_down_sync(~0u, w.n, offset)};
    w = welford_combine(b, w);
  }
#pragma unroll
  for (int offset = 2; offset > 0; offset >>= 1) {
    if (lane == 0 && warp >= offset && warp < 2 * offset) {
      float* slot = shared + 3 * (warp - offset);
      slot[0] = w.mean; slot[1] = w.m2; slot[2] = w.n;
    }
    __syncthreads();
    if (lane == 0 && warp < offset) {
      float* slot = shared + 3 * warp;
      Welford b = {slot[0], slot[1], slot[2]};
      w = welford_combine(b, w);
    }
    __syncthreads();
  }
  return w;
}
__device__ __forceinline__ float modulated(float x, float mean, float rstd, float scale, float shift, int plus_one) {
  float m = plus_one ? rounded(1.f + scale) : scale;
  return shift + rounded(rstd * (x - mean)) * m;
}
__device__ __forceinline__ uint2 modulated_vector(uint2 x, uint2 s, uint2 h, float mean, float rstd, int plus_one) {
  uint2 o = {pack(modulated(low(x.x), mean, rstd, low(s.x), low(h.x), plus_one), modulated(high(x.x), mean, rstd, high(s.x), high(h.x), plus_one)),
             pack(modulated(low(x.y), mean, rstd, low(s.y), low(h.y), plus_one), modulated(high(x.y), mean, rstd, high(s.y), high(h.y), plus_one))};
  return o;
}

// Strides in elements. PER_THREAD vectors of a row stay in registers (0: any width, the row is read twice; 1: up to 128 vectors; more: exactly
// 128 * PER_THREAD vectors, so that every 1 / n above is a constant).
struct NormStrides { i64 x_batch, x_row, scale_batch, scale_row, shift_batch, shift_row; };
template <int PER_THREAD>
__device__ __forceinline__ void layer_norm_modulate(u16* out, const u16* x, const u16* scale, const u16* shift, NormStrides s, i64 rows, int vectors,
                                                    float eps, int plus_one) {
  __shared__ float shared[8];
  const int t = threadIdx.x;
  i64 row = blockIdx.x, b = row / rows, token = row - b * rows;
  const uint2* xs = (const uint2*)(x + b * s.x_batch + token * s.x_row);
  const uint2* scales = (const uint2*)(scale + b * s.scale_batch + token * s.scale_row);
  const uint2* shifts = (const uint2*)(shift + b * s.shift_batch + token * s.shift_row);
  uint2* os = (uint2*)out + row * vectors;
  constexpr int KEEP = PER_THREAD > 0 ? PER_THREAD : 1;
  const bool mine = PER_THREAD > 1 || t < vectors;
  uint2 kept[KEEP], kept_scale[KEEP], kept_shift[KEEP];
  Welford w = {0.f, 0.f, 0.f};
  if (PER_THREAD > 0) {
#pragma unroll
    for (int k = 0; k < KEEP; k++) if (mine) kept[k] = xs[t + k * 128];
#pragma unroll
    for (int k = 0; k < KEEP; k++) if (mine) { kept_scale[k] = scales[t + k * 128]; kept_shift[k] = shifts[t + k * 128]; }
#pragma unroll
    for (int k = 0; k < KEEP; k++)
      if (mine) {
        w = welford_add(low(kept[k].x), w); w = welford_add(high(kept[k].x), w);
        w = welford_add(low(kept[k].y), w); w = welford_add(high(kept[k].y), w);
      }
  } else {
    for (int i = t; i < vectors; i += 128) {
      uint2 v = xs[i];
      w = welford_add(low(v.x), w); w = welford_add(high(v.x), w); w = welford_add(low(v.y), w); w = welford_add(high(v.y), w);
    }
  }
  w = welford_row(w, shared);
  if (t == 0) { shared[0] = w.mean; shared[1] = w.m2 / float(vectors * 4); }
  __syncthreads();
  float mean = shared[0], rstd = rsqrtf(shared[1] + eps);
  if (PER_THREAD > 0) {
#pragma unroll
    for (int k = 0; k < KEEP; k++)
      if (mine) os[t + k * 128] = modulated_vector(kept[k], kept_scale[k], kept_shift[k], mean, rstd, plus_one);
  } else {
    for (int i = t; i < vectors; i += 128) os[i] = modulated_vector(xs[i], scales[i], shifts[i], mean, rstd, plus_one);
  }
}
#define LAYER_NORM_MODULATE(N)                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(128) layer_norm_modulate_##N(u16* out, const u16* x, const u16* scale, const u16* shift,          \
                                                                            NormStrides s, i64 rows, int vectors, float eps, int plus_one) {    \
    layer_norm_modulate<N>(out, x, scale, shift, s, rows, vectors, eps, plus_one);                                                              \
  }
LAYER_NORM_MODULATE(0)
LAYER_NORM_MODULATE(1)
LAYER_NORM_MODULATE(6)
