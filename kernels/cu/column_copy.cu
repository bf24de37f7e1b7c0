// out[row, :width] = in[row, :width] for rows at strides out_row, in_row (elements); moves bits. A thread moves COPY_ROWS vectors of 16 bytes.
#define COPY_ROWS 4
extern "C" __global__ void __launch_bounds__(128) column_copy(u16* out, const u16* in, i64 out_row, i64 in_row, i64 rows, int width) {
  int column = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (column >= width) return;
  i64 first = (i64)blockIdx.y * COPY_ROWS;
  uint4 v[COPY_ROWS];
#pragma unroll
  for (int k = 0; k < COPY_ROWS; k++) if (first + k < rows) v[k] = *(const uint4*)(in + (first + k) * in_row + column);
#pragma unroll
  for (int k = 0; k < COPY_ROWS; k++) if (first + k < rows) *(uint4*)(out + (first + k) * out_row + column) = v[k];
}
