#include "stack_impl.h"

template void truedraft::run_stack(const StackInput<float, float>&, int);
