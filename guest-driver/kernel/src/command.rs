// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
//! Control commands: a command out, its response back, an errno if it failed.
use crate::device::Device;
use crate::sys::error::{Errno, Result};
use virtio_rdma_spec::command::{opcode, CommandHeader, Handle, ResponseHeader};
use virtio_rdma_spec::layout::Layout;

/// The body of a response that has none.
type Empty = [u8; 0];

impl Device {
    /// Sends a command and waits for its response. May sleep, for as long as the device takes.
    pub(crate) fn command<C: Layout, R: Layout>(&self, code: u16, body: &C) -> Result<R> {
        let length = CommandHeader::SIZE + <C as Layout>::SIZE;
        let header = CommandHeader {
            opcode: code,
            reserved: 0,
            length: length as u32,
        };
        let room = ResponseHeader::SIZE + <R as Layout>::SIZE;
        let answer = self
            .commands()
            .execute(length, room, |command| {
                header.put(command);
                if let Some(at) = command.get_mut(CommandHeader::SIZE..) {
                    body.put(at);
                }
            })
            .inspect_err(|_| self.note_loss())?;
        // A chain that the device cannot make sense of comes back empty.
        let response = answer.bytes();
        let body = response.get(ResponseHeader::SIZE..).ok_or(Errno::EIO)?;
        let header: ResponseHeader = Layout::get(response);
        Errno::check_status(header.status)?;
        // What the device knows no answer for counts as zero.
        Ok(R::get(body))
    }

    /// Sends a command whose response has no body.
    pub(crate) fn simple_command<C: Layout>(&self, code: u16, body: &C) -> Result<()> {
        self.command::<C, Empty>(code, body).map(|_| ())
    }

    /// Destroys an object. It is gone, too, if the device does not know it (any longer), or if the
    /// device failed: then it was reset.
    pub(crate) fn destroy(&self, code: u16, handle: u32) -> Result<()> {
        let body = Handle {
            handle,
            reserved: 0,
        };
        match self.simple_command(code, &body) {
            Err(Errno::ENOENT) => Ok(()),
            Err(_) if self.commands().is_dead() => Ok(()),
            result => result,
        }
    }

    /// Destroys an object whose memory is given back in any case: a device that does not let go of
    /// it is reset.
    pub(crate) fn must_destroy(&self, code: u16, handle: u32) {
        if let Err(error) = self.destroy(code, handle) {
            let name = opcode::name(code).unwrap_or("a command");
            self.virtio().failed(name, error);
            self.fail("the device does not let go of an object");
        }
    }
}
