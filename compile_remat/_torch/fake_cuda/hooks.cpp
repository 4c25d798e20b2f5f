// What C++ asks about CUDA, answered as on a machine with one CUDA device and cuDNN.  See hooks.py.
//
// A question that is not answered here goes to torch's CUDAHooksInterface, which raises "... without ATen_cuda library".
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace {

constexpr long kCudnnVersion = 91300;

struct OneDevice final : at::CUDAHooksInterface {
  explicit OneDevice(at::CUDAHooksArgs) {}

  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }  // streams are never asked for
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }

  // Which kernel a convolution gets, and with it its layout.
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  long versionCuDNN() const override { return kCudnnVersion; }
  long versionRuntimeCuDNN() const override { return kCudnnVersion; }
  double batchnormMinEpsilonCuDNN() const override { return 1e-5; }
};

std::unique_ptr<at::CUDAHooksInterface> make(at::CUDAHooksArgs args) {
  return std::make_unique<OneDevice>(args);
}

}  // namespace

// To be called before torch asks for its hooks the first time: it keeps what it got.  Returns 0 where that was in time.
extern "C" int register_device() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(
      new c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>());
  at::CUDAHooksRegistry()->Register("CUDAHooks", make, "", c10::REGISTRY_PREFERRED);
  return dynamic_cast<const OneDevice*>(&at::detail::getCUDAHooks()) == nullptr;
}
