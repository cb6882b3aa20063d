#include "stack_impl.h"

template void truedraft::run_stack(const StackInput<bf16, int8_t>&, int);
