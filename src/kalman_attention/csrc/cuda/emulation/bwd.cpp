// The backward kernels on the host.
#include "../kla_scan_bwd.cu"
