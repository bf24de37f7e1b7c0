// out = r(x + r(y * gate)); rows of D elements, `gate` broadcast over rows through its strides (in elements, 0 where broadcast).
// A thread keeps its gate vector in registers while it walks ROWS rows, so the gate is read once for all of them.
struct GateStrides { i64 x_batch, x_row, y_batch, y_row, g_batch, g_row, o_batch, o_row; };
#define GATE_ROWS 8

__device__ __forceinline__ u32 gate_pair(u32 x, u32 y, u32 g) {
  return pack(low(x) + rounded(low(y) * low(g)), high(x) + rounded(high(y) * high(g)));
}
__device__ __forceinline__ uint4 gate_vector(uint4 x, uint4 y, uint4 g) {
  uint4 o = {gate_pair(x.x, y.x, g.x), gate_pair(x.y, y.y, g.y), gate_pair(x.z, y.z, g.z), gate_pair(x.w, y.w, g.w)};
  return o;
}

// 8 elements a thread; every pointer and stride a multiple of 16 bytes. Grid: (column blocks, row blocks, batch).
extern "C" __global__ void residual_gate_vec(u16* out, const u16* x, const u16* y, const u16* g, GateStrides s, i64 rows, int d) {
  int column = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (column >= d) return;
  i64 b = blockIdx.z, first = (i64)blockIdx.y * GATE_ROWS;
  const u16 *xp = x + b * s.x_batch + first * s.x_row + column, *yp = y + b * s.y_batch + first * s.y_row + column;
  const u16* gp = g + b * s.g_batch + first * s.g_row + column;
  u16* op = out + b * s.o_batch + first * s.o_row + column;
  uint4 gate = *(const uint4*)gp;
  if (first + GATE_ROWS <= rows && s.g_row == 0) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint4 xs[GATE_ROWS / 2], ys[GATE_ROWS / 2];
#pragma unroll
      for (int k = 0; k < GATE_ROWS / 2; k++) {
        xs[k] = *(const uint4*)(xp + k * s.x_row);
        ys[k] = *(const uint4*)(yp + k * s.y_row);
      }
#pragma unroll
      for (int k = 0; k < GATE_ROWS / 2; k++) *(uint4*)(op + k * s.o_row) = gate_vector(xs[k], ys[k], gate);
      xp += GATE_ROWS / 2 * s.x_row; yp += GATE_ROWS / 2 * s.y_row; op += GATE_ROWS / 2 * s.o_row;
    }
  } else {
    for (i64 row = first; row < rows && row < first + GATE_ROWS; row++) {
      *(uint4*)op = gate_vector(*(const uint4*)xp, *(const uint4*)yp, *(const uint4*)gp);
      xp += s.x_row; yp += s.y_row; gp += s.g_row; op += s.o_row;
    }
  }
}

// One element a thread: any D, any alignment.
extern "C" __global__ void residual_gate_scalar(u16* out, const u16* x, const u16* y, const u16* g, GateStrides s, i64 rows, int d) {
  int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= d) return;
  i64 b = blockIdx.z, first = (i64)blockIdx.y * GATE_ROWS;
  for (i64 row = first; row < rows && row < first + GATE_ROWS; row++) {
    float v = rounded(to_float(y[b * s.y_batch + row * s.y_row + column]) * to_float(g[b * s.g_batch + row * s.g_row + column]));
    out[b * s.o_batch + row * s.o_row + column] = to_half(to_float(x[b * s.x_batch + row * s.x_row + column]) + v);
  }
}
