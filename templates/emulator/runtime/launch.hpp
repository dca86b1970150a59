// The entry: the grid, cluster by cluster, or a few blocks at a time.
namespace emulator {

i32 run(const Launch& launch, void (*kernel)(const Launch&)) {
  Shape shape{static_cast<u32>(launch.block), static_cast<u32>(launch.block * launch.cluster)};
  Machine local{launch, kernel, shape, Stacks{launch.block * (launch.resident ? launch.resident : launch.cluster)}};
  if (!local.stacks.usable()) {
    snprintf(launch.message, launch.message_bytes, "%s: no memory for the stacks of a cluster's threads", launch.kernel);
    return 1;
  }
  machine = &local;
  map_buffers();
  if (launch.resident) run_waiting_grid();
  else for (i32 b = 0; b < launch.grid && !local.failed; b += launch.cluster) run_cluster(b);
  machine = nullptr;
  return local.bad_index ? 2 : local.failed;
}

}  // namespace emulator
