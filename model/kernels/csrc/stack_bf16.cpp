#include "stack_impl.h"

template void truedraft::run_stack<truedraft::bf16>(const StackInput<bf16>&, int);
