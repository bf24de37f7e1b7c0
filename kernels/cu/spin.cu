// Keeps the GPU busy for about `cycles` clock cycles, so that what is timed next has been queued before it runs.
extern "C" __global__ void spin(i64 cycles) {
  i64 start = clock64();
  while (clock64() - start < cycles) {}
}
