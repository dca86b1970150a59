// The entry: the grid, cluster by cluster.
namespace emulator {

i32 run(const Launch& launch, void (*kernel)(const Launch&)) {
  Shape shape{static_cast<u32>(launch.block), static_cast<u32>(launch.block * launch.cluster)};
  Machine local{launch, kernel, shape, Stacks{launch.block * launch.cluster}};
  if (!local.stacks.usable()) {
    snprintf(launch.message, launch.message_bytes, "%s: no memory for the stacks of a cluster's threads", launch.kernel);
    return 1;
  }
  machine = &local;
  map_buffers();
  for (i32 b = 0; b < launch.grid && !local.failed; b += launch.cluster) run_cluster(b);
  machine = nullptr;
  return local.bad_index ? 2 : local.failed;
}

}  // namespace emulator
