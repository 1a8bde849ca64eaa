// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Layers around any port.
pub(crate) mod faults;
pub(crate) mod plan;
pub mod settings;
