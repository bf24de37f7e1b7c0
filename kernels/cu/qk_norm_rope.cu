// RMSNorm over the head (as PyTorch: each lane sums 4 consecutive squares in order, then shuffle down), times weight, round, RoPE, round.
// Two streams (text, image) and both of q and k in one launch. A block is one token; its 8 warps take the token's heads of q, then of k,
// QK_UNROLL of them in flight at a time. Strides in elements.
struct QkOut { i64 batch, row, head; };
#define QK_UNROLL 6

// ROPE 0: comfy-kitchen's order, 1: eager torch's (mul, then addcmul_).
template <int ROPE>
__device__ __forceinline__ float rotate(float fa, float a, float fb, float b) {
  return ROPE == 0 ? fmaf(fa, a, fb * b) : fmaf(fb, b, fa * a);
}

// Division of the sum by DIM, a power of two, is the exact multiplication by its inverse.
template <int ROPE, int DIM>
__device__ __forceinline__ uint2 norm_rope(uint2 v, uint2 weight, float4 p0, float4 p1, float eps) {
  float x0 = low(v.x), x1 = high(v.x), x2 = low(v.y), x3 = high(v.y), sum = 0.f;
  sum = sum + x0 * x0; sum = sum + x1 * x1; sum = sum + x2 * x2; sum = sum + x3 * x3;
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) sum = sum + __shfl_down_sync(~0u, sum, offset);
  sum = __shfl_sync(~0u, sum, 0);
  float r = rsqrtf(sum * (1.f / DIM) + eps);
  x0 = rounded(low(weight.x) * (r * x0)); x1 = rounded(high(weight.x) * (r * x1));
  x2 = rounded(low(weight.y) * (r * x2)); x3 = rounded(high(weight.y) * (r * x3));
  uint2 result = {pack(rotate<ROPE>(p0.x, x0, p0.y, x1), rotate<ROPE>(p0.z, x0, p0.w, x1)),
                  pack(rotate<ROPE>(p1.x, x2, p1.y, x3), rotate<ROPE>(p1.z, x2, p1.w, x3))};
  return result;
}

template <int ROPE, int DIM>
__device__ __forceinline__ void qk_norm_rope(u16* q_out, u16* k_out, const float* pe, const u16* q, const u16* k, const u16* q_weight, const u16* k_weight,
                                             QkOut o, i64 pe_batch, int heads, float eps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, items = k_out ? 2 * heads : heads;
  const i64 b = blockIdx.y, token = blockIdx.x;
  const bool active = DIM == 128 || lane * 4 < DIM;
  uint2 qw = {0u, 0u}, kw = qw;
  float4 p0 = {0.f, 0.f, 0.f, 0.f}, p1 = p0;
  if (active) {
    const float4* p = (const float4*)(pe + b * pe_batch + token * DIM * 2) + lane * 2;
    p0 = p[0]; p1 = p[1];
    qw = ((const uint2*)q_weight)[lane];
    if (k_out) kw = ((const uint2*)k_weight)[lane];
  }
  const i64 at = b * o.batch + token * o.row + lane * 4;
  for (int first = warp; first < items; first += 8 * QK_UNROLL) {
    uint2 v[QK_UNROLL];
#pragma unroll
    for (int i = 0; i < QK_UNROLL; i++) {
      int item = first + 8 * i;
      v[i].x = v[i].y = 0u;
      if (active && item < items) v[i] = *(const uint2*)(item < heads ? q + item * DIM + lane * 4 : k + (item - heads) * DIM + lane * 4);
    }
#pragma unroll
    for (int i = 0; i < QK_UNROLL; i++) {
      int item = first + 8 * i;
      bool is_k = item >= heads;
      uint2 result = norm_rope<ROPE, DIM>(v[i], is_k ? kw : qw, p0, p1, eps);
      if (active && item < items) *(uint2*)(is_k ? k_out + at + (item - heads) * o.head : q_out + at + item * o.head) = result;
    }
  }
}
#define QK_NORM_ROPE(ROPE, DIM)                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(256, 5) qk_norm_rope_##ROPE##_##DIM(                                                             \
      u16* q_out, u16* k_out, const float* pe, const u16* q0, const u16* k0, const u16* qw0, const u16* kw0, const u16* q1, const u16* k1,      \
      const u16* qw1, const u16* kw1, i64 batch0, i64 row0, i64 batch1, i64 row1, QkOut o, i64 pe_batch, int text_tokens, int heads,             \
      float eps) {                                                                                                                              \
    const bool is_text = blockIdx.x < text_tokens;                                                                                              \
    const i64 at = is_text ? blockIdx.y * batch0 + blockIdx.x * row0 : blockIdx.y * batch1 + (blockIdx.x - text_tokens) * row1;                  \
    qk_norm_rope<ROPE, DIM>(q_out, k_out, pe, (is_text ? q0 : q1) + at, (is_text ? k0 : k1) + at, is_text ? qw0 : qw1, is_text ? kw0 : kw1, o,   \
                            pe_batch, heads, eps);                                                                                              \
  }
QK_NORM_ROPE(0, 128)
QK_NORM_ROPE(1, 128)
QK_NORM_ROPE(0, 64)
QK_NORM_ROPE(1, 64)
