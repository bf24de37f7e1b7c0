// out[b, h, token, :] = token < text_tokens ? text[b, token, h, :] : image[b, token - text_tokens, h, :]; moves bits, computes nothing.
// Rows of the sources hold the heads side by side at strides batch, row; out is contiguous (b, head, token, dim). A block is 8 tokens.
extern "C" __global__ void __launch_bounds__(256) head_concat(u16* out, const u16* text, const u16* image, i64 text_batch, i64 text_row, i64 image_batch,
                                                              i64 image_row, int text_tokens, int tokens, int heads, int head_dim) {
  const i64 b = blockIdx.y;
  const int vectors = head_dim / 8, per_token = heads * vectors, first = blockIdx.x * 8, here = min(8, tokens - first);
  // Consecutive threads walk the dims of one head of one token, then the 8 tokens, then the heads: 8 * head_dim contiguous elements of out.
  for (int i = threadIdx.x; i < per_token * 8; i += 256) {
    int vector = i % vectors, rest = i / vectors, t = rest % 8, head = rest / 8;
    if (t >= here) continue;
    i64 token = first + t;
    const u16* row = token < text_tokens ? text + b * text_batch + token * text_row : image + b * image_batch + (token - text_tokens) * image_row;
    ((uint4*)out)[((b * heads + head) * tokens + token) * vectors + vector] = *(const uint4*)(row + head * head_dim + vector * 8);
  }
}
