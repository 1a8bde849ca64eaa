// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A connection: what is known of it, how far it is, and what its socket says.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use virtio_rdma_spec::command::status;
use virtio_rdma_spec::iwarp::{iw_event, IwEvent};

use super::mpa::Frame;
use super::outgoing::Pool;
use super::port::{Depths, Port, PrivateData};
use super::stream::{Agreed, Stream};
use super::{fpdu, tcp};
use crate::engine::queue_pair::Qp;
use crate::engine::tables::Tables;

/// Bytes of requests and replies, at most.
const LONGEST_FRAME: usize = 20 + 512;
/// How often the memory for what is to be sent is filled and sent, before others have their turn.
const PUMPED: usize = 4;

/// How far a connection is.
#[derive(Debug)]
pub(super) enum Phase {
    /// TCP connects.
    Connecting,
    /// The request was sent.
    AwaitsReply,
    /// A request is to come.
    AwaitsRequest,
    /// It has come, and the driver decides.
    Requested(Box<Frame>),
    /// It was accepted, and the initiator is to show that it is ready.
    Accepted(Box<Stream>),
    /// FPDUs go both ways.
    Streams(Box<Stream>),
    /// The other end is in this process, and messages go to it directly.
    Direct,
    /// Nothing is sent any longer, and the peer is to close, too.
    Closes(u16),
}

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) port: Arc<Port>,
    /// Its number for the driver.
    pub(super) id: u32,
    pub(super) socket: TcpStream,
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    /// The longest ULPDU that fits a segment of TCP.
    pub(super) longest: usize,
    pub(super) qp: Option<Arc<Qp>>,
    /// Which life of the queue pair it is for.
    pub(super) life: u32,
    pub(super) depths: Depths,
    pub(super) private: PrivateData,
    pub(super) phase: Phase,
    /// The driver asked for it, and was not told what came of that.
    pub(super) owes_reply: bool,
    /// When the reply came that says yes, or went to an initiator that need not send first, nanoseconds.
    pub(super) replied: Option<u64>,
    /// Bytes of the request or reply.
    pub(super) input: Vec<u8>,
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// The peer has closed, behind what there is to read.
    pub(super) ends: bool,
    /// It is over, with this `status`, as soon as its VM runs.
    pub(super) over: Option<u16>,
    /// It is in the list of those that are to be served.
    pub(super) ready: bool,
    /// Until when the peer has to do what it has to.
    pub(super) deadline: Option<u64>,
}

/// What becomes of a connection after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// It waits.
    Waits,
    /// There is more to do.
    Again,
    /// Its VM is stopped, or the account of that has no room: there will be something later.
    Later,
    /// It is over, with this `status` for the driver.
    Over(u16),
}

/// An event with the private data of a frame.
pub(super) fn with_private(mut event: IwEvent, frame: &Frame) -> IwEvent {
    let most = usize::from(virtio_rdma_spec::iwarp::MAX_PRIVATE_DATA);
    let private = frame.private.get(..most).unwrap_or(&frame.private);
    for (to, from) in event.private_data.iter_mut().zip(private) {
        *to = *from;
    }
    event.private_length = u16::try_from(private.len()).unwrap_or_default();
    event
}

impl Connection {
    pub(super) fn new(port: Arc<Port>, id: u32, socket: TcpStream, phase: Phase) -> Self {
        let connecting = matches!(phase, Phase::Connecting);
        let nowhere = SocketAddr::from(([0; 4], 0));
        Self {
            port,
            id,
            socket,
            local: nowhere,
            remote: nowhere,
            longest: 0,
            qp: None,
            life: 0,
            depths: Depths { ord: 0, ird: 0 },
            private: PrivateData::new(),
            phase,
            owes_reply: connecting,
            replied: None,
            input: Vec::new(),
            readable: true,
            writable: !connecting,
            ends: false,
            over: None,
            ready: false,
            deadline: None,
        }
    }

    /// The socket is connected.
    pub(super) fn set_up(&mut self) -> io::Result<()> {
        let segment = tcp::set_up(&self.socket)?;
        // An FPDU is no longer than a segment of TCP.
        self.longest = fpdu::ulpdu_within(segment);
        self.local = self.socket.local_addr()?;
        self.remote = self.socket.peer_addr()?;
        Ok(())
    }

    pub(super) fn new_stream(&self, crc: bool) -> Stream {
        let agreed = Agreed {
            crc,
            longest: self.longest,
            ord: self.depths.ord,
            ird: self.depths.ird,
        };
        Stream::new(agreed, self.port.vm.footprint().empty())
    }

    /// Whether its stream has something to send.
    pub(super) fn waits_to_send(&self) -> bool {
        match &self.phase {
            Phase::Accepted(stream) | Phase::Streams(stream) => !stream.is_sent(),
            _ => false,
        }
    }

    /// Sends what waits, and what is to be answered, as far as the socket takes it, the account of the
    /// VM has room for it, and others need not wait for long. Returns what is to follow.
    ///
    /// # Errors
    /// `status`, if the connection ends.
    pub(super) fn pump(
        &mut self,
        pool: &mut Pool,
        tables: &Tables,
        qp: &Arc<Qp>,
    ) -> Result<Step, u16> {
        let (Phase::Accepted(stream) | Phase::Streams(stream)) = &mut self.phase else {
            return Ok(Step::Waits);
        };
        for _ in 0..PUMPED {
            if stream.is_sent() {
                return Ok(Step::Waits);
            }
            let room = match stream.answer(pool, tables, qp) {
                Ok(room) => room,
                Err(end) => {
                    stream.tell(&end, &[]);
                    return Err(status::ECONNRESET);
                }
            };
            match stream.send(pool, &self.socket) {
                Ok(true) if room => {}
                Ok(true) => return Ok(Step::Later),
                Ok(false) => {
                    self.writable = false;
                    return Ok(Step::Waits);
                }
                Err(error) => return Err(tcp::status_of(&error)),
            }
        }
        Ok(Step::Again)
    }

    /// An event about it.
    pub(super) fn event(&self, kind: u16, status: u16) -> IwEvent {
        let (local, remote) = self.port.ends(self.local, self.remote);
        IwEvent {
            kind,
            status,
            local,
            remote,
            ord: self.depths.ord.into(),
            ird: self.depths.ird.into(),
            ..IwEvent::default()
        }
    }

    /// An event about a request or a reply: what the peer can have.
    pub(super) fn event_with(&self, kind: u16, frame: &Frame) -> IwEvent {
        let mut event = self.event(kind, 0);
        if kind == iw_event::CONNECT_REQUEST {
            let (ord, ird) = match frame.enhanced {
                Some(theirs) => (theirs.ird, theirs.ord),
                None => (u16::from(u8::MAX), u16::from(u8::MAX)),
            };
            let most = u16::from(crate::limits::MAX_RD_ATOMIC);
            (event.ord, event.ird) = (ord.min(most), ird.min(most));
        }
        event
    }

    /// Writes a frame, which a socket takes that has taken nothing else.
    pub(super) fn write_frame(&self, frame: &Frame) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(LONGEST_FRAME);
        frame.write(&mut bytes);
        let written = (&self.socket).write(&bytes)?;
        if written == bytes.len() {
            Ok(())
        } else {
            Err(ErrorKind::WriteZero.into())
        }
    }

    /// Reads bytes of a frame, as many as there may be.
    ///
    /// # Errors
    /// `status`, if the connection has ended.
    pub(super) fn read_input(&mut self) -> Result<(), u16> {
        let mut space = [0; LONGEST_FRAME];
        while self.readable && self.input.len() < LONGEST_FRAME {
            let room = LONGEST_FRAME - self.input.len();
            let space = space.get_mut(..room).unwrap_or_default();
            match (&self.socket).read(space) {
                Ok(0) => {
                    self.ends = true;
                    break;
                }
                Ok(read) => self
                    .input
                    .extend_from_slice(space.get(..read).unwrap_or_default()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.readable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(tcp::status_of(&error)),
            }
        }
        Ok(())
    }

    /// Nothing is to come now.
    ///
    /// # Errors
    /// `status`, if something does, or the connection has ended.
    pub(super) fn read_nothing(&mut self) -> Result<(), u16> {
        if !self.readable {
            return Ok(());
        }
        match (&self.socket).read(&mut [0; 1]) {
            Ok(0) => Err(0),
            Ok(_) => Err(status::ECONNRESET),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.readable = false;
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(tcp::status_of(&error)),
        }
    }

    /// What comes is of no interest. Reads no more than fits into `space`: others wait, too.
    ///
    /// # Errors
    /// If the connection has ended.
    pub(super) fn drain(&mut self, space: &mut [u8]) -> io::Result<()> {
        if !self.readable {
            return Ok(());
        }
        match (&self.socket).read(space) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => self.readable = false,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Reads what has come behind what the stream kept, into `space`. Returns how long both are, and
    /// whether the peer has closed.
    ///
    /// # Errors
    /// If the connection was reset.
    pub(super) fn fill(&mut self, space: &mut [u8]) -> io::Result<(usize, bool)> {
        let kept: &[u8] = match &self.phase {
            Phase::Accepted(stream) | Phase::Streams(stream) => stream.partial(),
            _ => &[],
        };
        let before = kept.len();
        if let Some(to) = space.get_mut(..before) {
            to.copy_from_slice(kept);
        }
        loop {
            let room = space.get_mut(before..).unwrap_or_default();
            let wanted = room.len();
            match (&self.socket).read(room) {
                Ok(0) => return Ok((before, true)),
                Ok(read) => {
                    // A short read leaves nothing behind, but for an end, of which epoll has told.
                    if read < wanted && !self.ends {
                        self.readable = false;
                    }
                    return Ok((before + read, false));
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.readable = false;
                    return Ok((before, false));
                }
                Err(error) => return Err(error),
            }
        }
    }
}
