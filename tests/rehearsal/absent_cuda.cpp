// What autograd asks of CUDA, answered where there is no driver: there is one device. Registered with precedence over
// torch's own hooks if this library is loaded before torch (conftest.py).
#include <ATen/detail/CUDAHooksInterface.h>
namespace at {
struct AbsentCUDA : CUDAHooksInterface {
  AbsentCUDA(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", ::c10::REGISTRY_PREFERRED, AbsentCUDA)
}
