/* libnvidia-ml.so.1, as far as UCX links to it. */
#define API __attribute__((visibility("default")))

API const char *nvmlErrorString(int result) { return result ? "NVML is not there: stand-in driver" : "Success"; }
