// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages of a front end, and their file descriptors, from its socket.
use std::fs::File;
use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{recvmsg, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

use super::protocol::{Header, Malformed, HEADER, MAX_FDS};

/// Why no more messages can be had.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("the protocol was violated")]
    Malformed(#[from] Malformed),
    #[error("more than {MAX_FDS} file descriptors came with a message")]
    Descriptors,
    #[error("a message is not complete")]
    Incomplete,
    #[error("the connection failed")]
    Failed(#[source] io::Error),
}

/// A request.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) header: Header,
    pub(super) body: Vec<u8>,
    pub(super) files: Vec<File>,
}

/// What there is at the socket of a front end.
#[derive(Debug)]
pub(super) enum Received {
    Message(Message),
    /// No message has come.
    Nothing,
    /// The front end has disconnected.
    End,
}

/// The socket of a front end.
#[derive(Debug)]
pub(super) struct Stream(pub(super) UnixStream);

impl Stream {
    /// The next request. It waits for the rest of one that has begun, and not for more.
    pub(super) fn receive(&mut self) -> Result<Received, Error> {
        let mut bytes = [0; HEADER];
        let mut files = Vec::new();
        let mut length = 0;
        while let Some(space) = bytes.get_mut(length..).filter(|space| !space.is_empty()) {
            match self.receive_part(space, &mut files, length != 0)? {
                None => return Ok(Received::Nothing),
                Some(0) if length == 0 => return Ok(Received::End),
                Some(0) => return Err(Error::Incomplete),
                Some(more) => length += more,
            }
        }
        let header = Header::read(&bytes)?;
        let mut body = vec![0; header.body];
        // File descriptors come with the first byte of a message. Others are closed by the kernel.
        self.0.read_exact(&mut body).map_err(|error| {
            match (error.kind(), error.raw_os_error()) {
                (io::ErrorKind::UnexpectedEof, _) => Error::Incomplete,
                _ => Error::Failed(error),
            }
        })?;
        Ok(Received::Message(Message {
            header,
            body,
            files,
        }))
    }

    /// None: there is nothing, and it does not wait.
    fn receive_part(
        &self,
        space: &mut [u8],
        files: &mut Vec<File>,
        waits: bool,
    ) -> Result<Option<usize>, Error> {
        let mut control = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut control);
        let mut space = [IoSliceMut::new(space)];
        let received = loop {
            let mut flags = RecvFlags::CMSG_CLOEXEC;
            flags.set(RecvFlags::DONTWAIT, !waits);
            match recvmsg(&self.0, &mut space, &mut control, flags) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if !waits => return Ok(None),
                // It has gone without reading all of our answers.
                Err(Errno::CONNRESET) => return Ok(Some(0)),
                result => break result.map_err(|error| Error::Failed(error.into()))?,
            }
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                files.extend(descriptors.map(File::from));
            }
        }
        if files.len() > MAX_FDS || received.flags.contains(rustix::net::ReturnFlags::CTRUNC) {
            return Err(Error::Descriptors);
        }
        Ok(Some(received.bytes))
    }

    /// What the socket has, without taking it. Does not wait. None: nothing has come. It is empty if
    /// the front end has disconnected, or the socket has failed.
    pub(super) fn peek<'b>(&self, space: &'b mut [u8]) -> Option<&'b [u8]> {
        let length = match self.receive_now(space, RecvFlags::PEEK) {
            Err(Errno::AGAIN) => return None,
            received => received.unwrap_or(0),
        };
        space.get(..length)
    }

    /// Takes what it has shown. Returns whether it could.
    pub(super) fn skip(&mut self, seen: &mut [u8]) -> bool {
        self.receive_now(seen, RecvFlags::empty()) == Ok(seen.len())
    }

    // A worker may make no other system call for this.
    fn receive_now(&self, space: &mut [u8], flags: RecvFlags) -> Result<usize, Errno> {
        let parts = &mut [IoSliceMut::new(space)];
        let none = &mut RecvAncillaryBuffer::default();
        let received = recvmsg(&self.0, parts, none, flags | RecvFlags::DONTWAIT)?;
        Ok(received.bytes)
    }

    /// Answers a request.
    pub(super) fn reply(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.0.write_all(bytes).map_err(Error::Failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{sendmsg, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    use std::io::IoSlice;
    use std::os::fd::AsFd;

    fn pair() -> (UnixStream, Stream) {
        let (client, server) = UnixStream::pair().unwrap();
        (client, Stream(server))
    }

    fn received(stream: &mut Stream) -> Message {
        match stream.receive() {
            Ok(Received::Message(message)) => message,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_looked_at_stays_with_its_files() {
        let (mut client, mut stream) = pair();
        let mut space = [0; HEADER + 8];
        assert_eq!(stream.peek(&mut space), None);
        assert!(matches!(stream.receive(), Ok(Received::Nothing)));
        client.write_all(&message(2)).unwrap();
        send_with_files(&client, &message(3), 2);
        assert_eq!(stream.peek(&mut space[..HEADER + 2]), Some(&*message(2)));
        assert!(stream.skip(&mut space[..HEADER + 2]));
        assert_eq!(stream.peek(&mut space), Some(&*message(3)));
        let message = received(&mut stream);
        assert_eq!((message.body.len(), message.files.len()), (3, 2));
        assert!(matches!(stream.receive(), Ok(Received::Nothing)));
        drop(client);
        assert_eq!(stream.peek(&mut space), Some(&[][..]));
    }

    fn message(length: u32) -> Vec<u8> {
        let mut bytes = vec![0; HEADER];
        bytes[4..8].copy_from_slice(&(HEADER as u32 + length).to_le_bytes());
        bytes.resize(HEADER + length as usize, 7);
        bytes
    }

    fn send_with_files(client: &UnixStream, bytes: &[u8], count: usize) {
        let null = File::open("/dev/null").unwrap();
        let files = vec![null.as_fd(); count];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FDS + 1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        let bytes = [IoSlice::new(bytes)];
        sendmsg(client, &bytes, &mut control, SendFlags::empty()).unwrap();
    }

    #[test]
    fn messages_come_with_their_files_and_one_after_the_other() {
        let (mut client, mut stream) = pair();
        send_with_files(&client, &message(3), MAX_FDS);
        client.write_all(&message(0)).unwrap();
        drop(client);
        let first = received(&mut stream);
        assert_eq!((first.body, first.files.len()), (vec![7; 3], MAX_FDS));
        let second = received(&mut stream);
        assert_eq!((second.body.len(), second.files.len()), (0, 0));
        assert!(matches!(stream.receive(), Ok(Received::End)));
    }

    #[test]
    fn a_header_may_come_in_parts() {
        let (mut client, mut stream) = pair();
        let bytes = message(2);
        let (first, rest) = bytes.split_at(5);
        send_with_files(&client, first, 1);
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| received(&mut stream));
            client.write_all(rest).unwrap();
            let message = receiver.join().unwrap();
            assert_eq!((message.body.len(), message.files.len()), (2, 1));
        });
    }

    #[test]
    fn what_is_no_message_ends_the_session() {
        let short = message(8);
        for length in [1, HEADER - 1, HEADER, HEADER + 7] {
            let (mut client, mut stream) = pair();
            client.write_all(&short[..length]).unwrap();
            drop(client);
            assert!(matches!(stream.receive(), Err(Error::Incomplete)));
        }
        let (client, mut stream) = pair();
        send_with_files(&client, &message(0), MAX_FDS + 1);
        assert!(matches!(stream.receive(), Err(Error::Descriptors)));
        let (mut client, mut stream) = pair();
        client.write_all(&[0xff; HEADER]).unwrap();
        assert!(matches!(stream.receive(), Err(Error::Malformed(_))));
    }
}
