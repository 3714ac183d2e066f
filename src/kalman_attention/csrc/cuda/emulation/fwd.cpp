// The forward kernels on the host.
#include "../kla_scan_fwd.cu"
