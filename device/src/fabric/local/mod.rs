// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The local fabric: both queue pairs are in this process. There are no packets: the requester
//! calls the responder of its peer, payload is copied once, and the answer is there at once.
pub(crate) mod busy_poll;
mod fast_path;
pub(crate) mod lookup_cache;
mod peer;
pub(crate) mod requester;
