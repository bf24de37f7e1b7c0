// out[row] = [attention[row] | r(gelu_tanh(mlp[row]))]. Widths are multiples of 8, pointers and strides of 16 bytes.
// GELU 0 is PyTorch's expression with the library's tanhf. GELU 1 evaluates the same tanh with the library's large-argument formula for every
// argument: two fewer branches; whether the rounded results agree is proven over all 65 536 inputs before it is used.
template <int GELU>
__device__ __forceinline__ float gelu(float x) {
  const float beta = 1.41421356237309504880f * 1.12837916709551257390f * 0.5f, kappa = 0.044715f;
  float cube = x * x * x, inner = beta * (x + kappa * cube);
  if (GELU == 0) return 0.5f * x * (1.f + tanhf(inner));
  float e, inverse, magnitude = fabsf(inner);
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(magnitude * 2.885390081777927f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(e + 1.f));
  float t = fmaf(-2.f, inverse, 1.f);
  return 0.5f * x * (1.f + copysignf(magnitude >= 9.010913848876953f ? 1.f : t, inner));
}
template <int GELU>
__device__ __forceinline__ uint4 gelu_vector(uint4 v) {
  uint4 o = {pack(gelu<GELU>(low(v.x)), gelu<GELU>(high(v.x))), pack(gelu<GELU>(low(v.y)), gelu<GELU>(high(v.y))),
             pack(gelu<GELU>(low(v.z)), gelu<GELU>(high(v.z))), pack(gelu<GELU>(low(v.w)), gelu<GELU>(high(v.w)))};
  return o;
}
// Grid: (column blocks, row blocks of GELU_ROWS). Rows are batch * tokens, `tokens` of them a batch.
#define GELU_ROWS 4
template <int GELU>
__device__ __forceinline__ void gelu_concat(u16* out, const u16* attention, const u16* mlp, i64 attention_row, i64 mlp_row, i64 rows, int attention_width,
                                            int mlp_width) {
  int column = (blockIdx.x * blockDim.x + threadIdx.x) * 8, width = attention_width + mlp_width;
  if (column >= width) return;
  i64 first = (i64)blockIdx.y * GELU_ROWS;
  bool is_mlp = column >= attention_width;
  i64 stride = is_mlp ? mlp_row : attention_row;
  const u16* in = (is_mlp ? mlp + (column - attention_width) : attention + column) + first * stride;
  u16* o = out + first * width + column;
  uint4 v[GELU_ROWS];
#pragma unroll
  for (int k = 0; k < GELU_ROWS; k++) if (first + k < rows) v[k] = *(const uint4*)(in + k * stride);
#pragma unroll
  for (int k = 0; k < GELU_ROWS; k++) if (first + k < rows) *(uint4*)(o + k * width) = is_mlp ? gelu_vector<GELU>(v[k]) : v[k];
}
#define GELU_CONCAT(N)                                                                                                                          \
  extern "C" __global__ void __launch_bounds__(128) gelu_concat_##N(u16* out, const u16* attention, const u16* mlp, i64 attention_row,           \
                                                                    i64 mlp_row, i64 rows, int attention_width, int mlp_width) {                \
    gelu_concat<N>(out, attention, mlp, attention_row, mlp_row, rows, attention_width, mlp_width);                                              \
  }
GELU_CONCAT(0)
GELU_CONCAT(1)
