// A guard of the device type "cuda" for machines without one. torch asks it which GPU is current
// before it indexes or copies a tensor, which FakeTensorMode does not take over from it.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct OneGpu final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, OneGpu)
