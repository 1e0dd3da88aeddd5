// What torch asks of CUDA, answered where there is no driver: there is one device, and it has generators of random
// numbers. Registered with precedence over torch's own hooks if this library is loaded before torch (conftest.py).
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
namespace at {
struct AbsentGenerator : CPUGeneratorImpl {
  AbsentGenerator() { device_ = Device(kCUDA, 0); }
};
struct AbsentCUDA : CUDAHooksInterface {
  AbsentCUDA(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<AbsentGenerator>(); }
};
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", ::c10::REGISTRY_PREFERRED, AbsentCUDA)
}
