// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
/* The device's attributes, protection domains and the local DMA key. */
#include <rdma/ib_cache.h>

#include "kernel-verbs.h"

#define PORT 1

/* What storage protocols look at before they use a device. */
TEST(device_attributes)
{
	const struct ib_device_attr *attr = &device->attrs;

	CHECK(attr->max_qp > 100 && attr->max_qp_wr >= 1024);
	CHECK(attr->max_cq > 100 && attr->max_cqe >= 4096);
	CHECK(attr->max_mr > 100 && attr->max_pd > 10);
	CHECK(attr->max_send_sge >= 4 && attr->max_recv_sge >= 4 && attr->max_sge_rd >= 1);
	CHECK(attr->max_srq > 0 && attr->max_srq_wr >= 1024 && attr->max_srq_sge >= 1);
	CHECK(attr->max_qp_rd_atom >= 1 && attr->max_qp_init_rd_atom >= 1);
	CHECK(attr->page_size_cap & PAGE_SIZE);
	CHECK(device->num_comp_vectors >= 1);
	CHECK(attr->device_cap_flags & IB_DEVICE_RC_RNR_NAK_GEN);
}

TEST(device_fast_registration)
{
	need_fast_registration();
	CHECK(device->attrs.max_fast_reg_page_list_len >= 256);
}

/* Protocols size their requests by it, and the core the pages of what processes register. */
TEST(device_segments)
{
	CHECK(ib_dma_max_seg_size(device) >= SZ_2G);
}

TEST(device_port)
{
	struct ib_port_attr port;
	u16 pkey;

	OK(ib_query_port(device, PORT, &port));
	EQ(port.state, IB_PORT_ACTIVE);
	CHECK(port.max_msg_sz >= 1 << 20);
	CHECK(port.gid_tbl_len > 0 && port.pkey_tbl_len > 0);
	CHECK(rdma_protocol_roce(device, PORT));
	CHECK(rdma_cap_ib_cm(device, PORT));
	OK(ib_query_pkey(device, PORT, 0, &pkey));
	EQ(pkey, 0xffff);
	CHECK(ib_query_port(device, 99, &port));
}

TEST(pd_many)
{
	int i;

	for (i = 0; i < 64; i++)
		make_pd(0);
}

/* A domain's local DMA key names all memory, for local access. */
TEST(pd_local_dma_lkey)
{
	struct pair p = PAIR();
	struct buffer *from = make_buffer(8192), *to = make_buffer(8192);
	struct receive *receive = receive_into(&p.b, to, 8192);
	struct request *request = make_request(&p.a, IB_WR_SEND);

	fill(from->data, 8192, 1);
	with_sge(request, from->addr, 8192, p.a.pd->local_dma_lkey);
	post(&p.a, request);
	expect_ok(&request->op, IB_WC_SEND);
	expect_ok(&receive->op, IB_WC_RECV);
	EQ(receive->op.wc.byte_len, 8192);
	CHECK(filled(to->data, 8192, 1));
}

/* It is no remote key. */
TEST(pd_local_dma_lkey_is_local)
{
	struct pair p = PAIR();
	struct buffer *from = make_buffer(64), *to = make_buffer(64);

	fill(from->data, 64, 1);
	run(&p.a, make_rdma(&p.a, IB_WR_RDMA_WRITE, from, 64, to->addr, p.b.pd->local_dma_lkey), IB_WC_REM_ACCESS_ERR);
	CHECK(all_zero(to->data, 64));
}

/* Where a user asks for it, there is a key for remote access to all memory. */
TEST(pd_unsafe_global_rkey)
{
	struct pair p = {};
	struct options options = {};
	struct buffer *from = make_buffer(4096), *to = make_buffer(4096), *back = make_buffer(4096);

	p.b.pd = make_pd(IB_PD_UNSAFE_GLOBAL_RKEY);
	make_end(&p.a, &options, false);
	make_end(&p.b, &options, false);
	to_init(&p.a, &options);
	to_init(&p.b, &options);
	to_rtr(&p.a, &p.b, &options);
	to_rtr(&p.b, &p.a, &options);
	to_rts(&p.a, &options);
	to_rts(&p.b, &options);
	fill(from->data, 4096, 2);
	run(&p.a, make_rdma(&p.a, IB_WR_RDMA_WRITE, from, 4096, to->addr, p.b.pd->unsafe_global_rkey), IB_WC_SUCCESS);
	CHECK(filled(to->data, 4096, 2));
	run(&p.a, make_rdma(&p.a, IB_WR_RDMA_READ, back, 4096, to->addr, p.b.pd->unsafe_global_rkey), IB_WC_SUCCESS);
	CHECK(filled(back->data, 4096, 2));
}

const struct test device_tests[] = {
	ENTRY(device_attributes),
	ENTRY(device_fast_registration),
	ENTRY(device_segments),
	ENTRY(device_port),
	ENTRY(pd_many),
	ENTRY(pd_local_dma_lkey),
	ENTRY(pd_local_dma_lkey_is_local),
	ENTRY(pd_unsafe_global_rkey),
	{},
};
