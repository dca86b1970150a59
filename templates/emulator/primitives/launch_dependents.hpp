inline void launch_dependents() { emulator::launch_dependents(); }
