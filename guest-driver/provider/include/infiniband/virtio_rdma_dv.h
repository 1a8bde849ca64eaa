/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * What the virtio RDMA device has beyond the verbs: masked atomic operations, and
 * queue pairs of SRD. See virtio_rdma_dv(3).
 *
 * Link with -lvirtio_rdma -libverbs.
 */
#ifndef VIRTIO_RDMA_DV_H
#define VIRTIO_RDMA_DV_H

#include <stdint.h>

#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif

/* device_caps of struct virtio_rdma_dv_device_attr */
enum {
	VIRTIO_RDMA_DV_DEVICE_ATTR_CAPS_MASKED_ATOMICS = 1 << 0,
	VIRTIO_RDMA_DV_DEVICE_ATTR_CAPS_SRD = 1 << 1,
};

struct virtio_rdma_dv_device_attr {
	uint64_t comp_mask; /* out: 0 */
	uint32_t device_caps;
	uint8_t reserved[4];
};

int virtio_rdma_dv_query_device(struct ibv_context *context,
				struct virtio_rdma_dv_device_attr *attr,
				uint32_t inlen);

/* send_ops_flags of struct virtio_rdma_dv_qp_init_attr */
enum {
	VIRTIO_RDMA_DV_QP_EX_WITH_MASKED_ATOMIC_CMP_AND_SWP = 1 << 0,
	VIRTIO_RDMA_DV_QP_EX_WITH_MASKED_ATOMIC_FETCH_AND_ADD = 1 << 1,
};

/* driver_qp_type of struct virtio_rdma_dv_qp_init_attr, with IBV_QPT_DRIVER */
enum {
	VIRTIO_RDMA_DV_QP_DRIVER_TYPE_SRD = 1,
};

struct virtio_rdma_dv_qp_init_attr {
	uint64_t comp_mask; /* 0 */
	uint64_t send_ops_flags;
	uint32_t driver_qp_type; /* 0 if qp_type is another one */
	uint8_t reserved[4];
};

struct ibv_qp *virtio_rdma_dv_create_qp(struct ibv_context *context,
					struct ibv_qp_init_attr_ex *attr_ex,
					struct virtio_rdma_dv_qp_init_attr *attr,
					uint32_t inlen);

void virtio_rdma_dv_wr_masked_cmp_swp(struct ibv_qp_ex *qp, uint32_t rkey,
				      uint64_t remote_addr, uint64_t compare,
				      uint64_t swap, uint64_t compare_mask,
				      uint64_t swap_mask);

void virtio_rdma_dv_wr_masked_fetch_add(struct ibv_qp_ex *qp, uint32_t rkey,
					uint64_t remote_addr, uint64_t add,
					uint64_t boundary_mask);

#ifdef __cplusplus
}
#endif

#endif
