// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of the real process, driven over vhost-user by bare VMs.
mod appendix;
mod attributes;
mod commands;
mod common;
mod data;
mod datagram;
mod ends;
mod errors;
mod events;
mod fast;
mod frontend;
mod hostile;
mod lifecycle;
mod limits;
mod link;
mod memory;
mod moderation;
mod order;
mod peers;
mod sandbox;
mod scale;
mod srq;
mod states;
mod system_calls;
mod uc;
mod xrc;
