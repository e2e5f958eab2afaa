//! What MLX knows about a device.

use std::ffi::{CStr, CString};
use std::ptr;

use mlx_sys as ffi;

use super::device::DeviceKind;
use super::error;

/// Facts about a device; each is there only if the back-end tells it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name, such as "Apple M4 Pro" or "NVIDIA H200".
    pub name: Option<String>,
    /// Its memory in bytes; on Apple GPUs that of the whole machine.
    pub memory: Option<u64>,
    /// Bytes that the back-end recommends to use at most.
    pub recommended: Option<u64>,
}

/// What is known about the first device of a kind; nothing when there is none.
pub fn device_info(kind: DeviceKind) -> DeviceInfo {
    error::initialise();
    // SAFETY: both handles are freed here; strings are copied while the info they belong to is alive.
    unsafe {
        let device = ffi::mlx_device_new_type(kind.raw(), 0);
        let mut info = ffi::mlx_device_info_new();
        let read = ffi::mlx_device_info_get(&mut info, device) == 0;
        let found = if read { collect(info) } else { DeviceInfo::default() };
        ffi::mlx_device_info_free(info);
        ffi::mlx_device_free(device);
        found
    }
}

/// # Safety
/// `info` is a live handle.
unsafe fn collect(info: ffi::mlx_device_info) -> DeviceInfo {
    let size = |names: &[&str]| {
        names.iter().find_map(|name| {
            let mut value = 0;
            // SAFETY: the caller's handle is live; the key is a C string; one integer is written.
            let read = unsafe {
                has(info, name) && ffi::mlx_device_info_get_size(&mut value, info, key(name)?.as_ptr()) == 0
            };
            read.then_some(value as u64)
        })
    };
    let text = |name: &str| {
        let mut value = ptr::null();
        // SAFETY: as above; the string belongs to `info` and is copied at once.
        unsafe {
            if !has(info, name) || ffi::mlx_device_info_get_string(&mut value, info, key(name)?.as_ptr()) != 0
            {
                return None;
            }
            (!value.is_null()).then(|| CStr::from_ptr(value).to_string_lossy().into_owned())
        }
    };
    DeviceInfo {
        name: text("device_name"),
        memory: size(&["total_memory", "memory_size"]),
        recommended: size(&["max_recommended_working_set_size"]),
    }
}

/// # Safety
/// `info` is a live handle.
unsafe fn has(info: ffi::mlx_device_info, name: &str) -> bool {
    let (mut there, Some(key)) = (false, key(name)) else { return false };
    // SAFETY: the caller's handle is live; the key is a C string; one flag is written.
    unsafe { ffi::mlx_device_info_has_key(&mut there, info, key.as_ptr()) == 0 && there }
}

fn key(name: &str) -> Option<CString> {
    CString::new(name).ok()
}
