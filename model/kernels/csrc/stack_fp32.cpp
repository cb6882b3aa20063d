#include "stack_impl.h"

template void truedraft::run_stack<float>(const StackInput<float>&, int);
