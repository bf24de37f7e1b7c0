// RMSNorm over the head (as PyTorch: each lane sums 4 consecutive squares in order, then shuffle down), times weight, round, RoPE, round.
// Two streams (text, image) and both of q and k in one launch. Strides in elements. A block is one token of one of q or k: 8 warps, a
// warp takes heads warp, warp + 8, ...
struct QkStream { const u16 *q, *k, *q_weight, *k_weight; i64 batch, row; };
struct QkOut { i64 batch, row, head; };
#define QK_HEADS 3

// ROPE 0: comfy-kitchen's order, 1: eager torch's (mul, then addcmul_), 2: every product rounded on its own.
template <int ROPE>
__device__ __forceinline__ float rotate(float fa, float a, float fb, float b) {
  if (ROPE == 0) return fmaf(fa, a, fb * b);
  if (ROPE == 1) return fmaf(fb, b, fa * a);
  return __fadd_rn(__fmul_rn(fa, a), __fmul_rn(fb, b));
}

template <int ROPE>
__device__ __forceinline__ void qk_norm_rope(u16* q_out, u16* k_out, const float* pe, QkStream text, QkStream image, QkOut o, i64 pe_batch, int text_tokens,
                                             int heads, int head_dim, float eps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, tensors = k_out ? 2 : 1;
  const int is_k = tensors == 2 ? (blockIdx.y & 1) : 0;
  const i64 b = blockIdx.y / tensors, token = blockIdx.x;
  const bool is_image = token >= text_tokens, active = lane * 4 < head_dim;
  const QkStream& s = is_image ? image : text;
  const u16* in = (is_k ? s.k : s.q) + b * s.batch + (token - (is_image ? text_tokens : 0)) * s.row + lane * 4;
  u16* out = (is_k ? k_out : q_out) + b * o.batch + token * o.row + lane * 4;
  uint2 weight = {0u, 0u};
  float4 p0 = {0.f, 0.f, 0.f, 0.f}, p1 = p0;
  if (active) {
    weight = ((const uint2*)(is_k ? s.k_weight : s.q_weight))[lane];
    const float4* p = (const float4*)(pe + b * pe_batch + token * head_dim * 2) + lane * 2;
    p0 = p[0]; p1 = p[1];
  }
  for (int first = warp; first < heads; first += 8 * QK_HEADS) {
    uint2 v[QK_HEADS];
#pragma unroll
    for (int i = 0; i < QK_HEADS; i++) {
      v[i].x = v[i].y = 0u;
      if (active && first + 8 * i < heads) v[i] = *(const uint2*)(in + (i64)(first + 8 * i) * head_dim);
    }
#pragma unroll
    for (int i = 0; i < QK_HEADS; i++) {
      float x0 = low(v[i].x), x1 = high(v[i].x), x2 = low(v[i].y), x3 = high(v[i].y), sum = 0.f;
      sum = sum + x0 * x0; sum = sum + x1 * x1; sum = sum + x2 * x2; sum = sum + x3 * x3;
#pragma unroll
      for (int offset = 16; offset > 0; offset >>= 1) sum = sum + __shfl_down_sync(~0u, sum, offset);
      sum = __shfl_sync(~0u, sum, 0);
      float r = rsqrtf(sum / float(head_dim) + eps);
      x0 = rounded(low(weight.x) * (r * x0)); x1 = rounded(high(weight.x) * (r * x1));
      x2 = rounded(low(weight.y) * (r * x2)); x3 = rounded(high(weight.y) * (r * x3));
      if (active && first + 8 * i < heads) {
        uint2 result = {pack(rotate<ROPE>(p0.x, x0, p0.y, x1), rotate<ROPE>(p0.z, x0, p0.w, x1)),
                        pack(rotate<ROPE>(p1.x, x2, p1.y, x3), rotate<ROPE>(p1.z, x2, p1.w, x3))};
        *(uint2*)(out + (i64)(first + 8 * i) * o.head) = result;
      }
    }
  }
}
#define QK_NORM_ROPE(N)                                                                                                                         \
  extern "C" __global__ void __launch_bounds__(256) qk_norm_rope_##N(                                                                           \
      u16* q_out, u16* k_out, const float* pe, const u16* q0, const u16* k0, const u16* qw0, const u16* kw0, const u16* q1, const u16* k1,      \
      const u16* qw1, const u16* kw1, i64 batch0, i64 row0, i64 batch1, i64 row1, QkOut o, i64 pe_batch, int text_tokens, int heads,             \
      int head_dim, float eps) {                                                                                                                \
    QkStream text = {q0, k0, qw0, kw0, batch0, row0}, image = {q1, k1, qw1, kw1, batch1, row1};                                                 \
    qk_norm_rope<N>(q_out, k_out, pe, text, image, o, pe_batch, text_tokens, heads, head_dim, eps);                                             \
  }
QK_NORM_ROPE(0)
QK_NORM_ROPE(1)
QK_NORM_ROPE(2)
