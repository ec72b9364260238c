// A CUDA device without memory or kernels, for a torch built for the CPU only: one device, one stream, and hooks that
// say that it is available. Tensors on it are fake tensors (torch._subclasses.FakeTensorMode): shapes, dtypes and devices
// are real, values are not. Autograd runs backward passes of such tensors on a device thread, as on a GPU.
// Loaded with ctypes before torch is imported.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device kDevice(c10::kCUDA, 0);

struct FakeGuard final : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard);

}  // namespace

// torch looks the hooks up by this name.
struct CUDAHooks final : public at::CUDAHooksInterface {
  CUDAHooks() = default;
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
