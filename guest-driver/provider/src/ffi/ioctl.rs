// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Attributes of our own in ioctl commands.

use core::{mem, ptr};

use virtio_rdma_driver_core::abi;

use super::{sys, zeroed, Errno};

/// Room for `N` attributes, and what libibverbs says about them.
#[repr(C)]
pub struct Attrs<const N: usize> {
    buffer: sys::ibv_command_buffer,
    attrs: [sys::ib_uverbs_attr; N],
}

/// "None", as index of an attribute.
const NO_INDEX: u8 = 0xff;

impl<const N: usize> Attrs<N> {
    /// Attributes for a method, to be set all of them.
    pub fn new(object: u16, method: u16) -> Self {
        // libibverbs expects the attributes directly behind the header.
        const {
            assert!(
                mem::offset_of!(Self, attrs)
                    == mem::offset_of!(sys::ibv_command_buffer, hdr)
                        + mem::offset_of!(sys::ib_uverbs_ioctl_hdr, attrs)
            )
        };
        let mut buffer: sys::ibv_command_buffer = zeroed();
        buffer.uhw_in_idx = NO_INDEX;
        buffer.uhw_out_idx = NO_INDEX;
        buffer.hdr.object_id = object;
        buffer.hdr.method_id = method;
        Self {
            buffer,
            attrs: [const { zeroed() }; N],
        }
    }

    fn set(&mut self, index: usize, id: u16, length: usize, data: u64) {
        if let Some(attr) = self.attrs.get_mut(index) {
            attr.attr_id = id;
            attr.flags = sys::UVERBS_ATTR_F_MANDATORY as u16;
            attr.len = length as u16;
            attr.__bindgen_anon_1.data = data;
        }
    }

    /// An attribute that names an object.
    pub fn object(&mut self, index: usize, id: u16, handle: u32) {
        self.set(index, id, 0, handle.into());
    }

    /// An attribute that the kernel writes. The data must stay where they are until the command was
    /// executed.
    pub fn output<const L: usize>(&mut self, index: usize, id: u16, data: &mut [u8; L]) {
        self.set(index, id, L, data.as_mut_ptr().expose_provenance() as u64);
    }

    /// The attributes for a command of libibverbs, which adds its own. They must stay where they
    /// are until then.
    pub fn link(&mut self) -> *mut sys::ibv_command_buffer {
        let this = ptr::from_mut(self);
        // SAFETY: places within the structure, or at its end.
        unsafe {
            let first = (&raw mut (*this).attrs).cast::<sys::ib_uverbs_attr>();
            (*this).buffer.next_attr = first.add(N);
            (*this).buffer.last_attr = first.add(N);
        }
        this.cast()
    }

    /// Executes a method that has no other attributes.
    ///
    /// # Safety
    /// The context is alive, and so is what outputs go to.
    pub unsafe fn execute(&mut self, context: *mut sys::ibv_context) -> Result<(), Errno> {
        let buffer = self.link();
        // SAFETY: as the caller says; the buffer is complete.
        Errno::check(unsafe { sys::execute_ioctl(context, buffer) })
    }
}

/// How device memory is mapped: the answer of the kernel.
pub type DmBytes = [u8; abi::DmResponse::SIZE];
