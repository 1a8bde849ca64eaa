// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Posting: every operation in both interfaces, inline data, lists, fence, solicited events,
 * selective completions.
 */
#include "verbs-test.h"

#include <arpa/inet.h>

#define BASIC_OPS                                                                                                   \
	(IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |                           \
	 IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |        \
	 IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD)

static void all_operations(bool ex)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .ops = ex ? BASIC_OPS : 0, .size = 65536);
	struct ibv_sge list[3] = { sge(&p.mr[0], 0, 1000), sge(&p.mr[0], 3000, 1), sge(&p.mr[0], 2000, 777) };
	struct ibv_wc wc;

	fill(p.mr[0].p, 4096, 1);
	RECV(p.qp[1], 10, &p.mr[1], 0, 4096);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 1, .list = list, .num_sge = 3, .ex = ex);
	expect_ok(p.cq[0], 1, SEND);
	wc = expect_ok(p.cq[1], 10, RECV);
	EQ(wc.byte_len, 1778);
	EQ(wc.wc_flags, 0);
	EQ(wc.qp_num, p.qp[1]->qp_num);
	CHECK(memcmp(p.mr[1].p, p.mr[0].p, 1000) == 0);
	EQ(p.mr[1].p[1000], p.mr[0].p[3000]);
	CHECK(memcmp(p.mr[1].p + 1001, p.mr[0].p + 2000, 777) == 0);

	RECV(p.qp[1], 11, &p.mr[1], 8192, 4096);
	POST(p.qp[0], .opcode = IBV_WR_SEND_WITH_IMM, .id = 2, .from = &p.mr[0], .length = 4096, .imm = htonl(0x01020304),
	     .ex = ex);
	expect_ok(p.cq[0], 2, SEND);
	wc = expect_ok(p.cq[1], 11, RECV);
	EQ(wc.wc_flags, IBV_WC_WITH_IMM);
	EQ(ntohl(wc.imm_data), 0x01020304);
	CHECK(filled(p.mr[1].p + 8192, 4096, 1));

	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 3, .from = &p.mr[0], .length = 4096, .to = &p.mr[1],
	     .to_offset = 16385, .ex = ex);
	expect_ok(p.cq[0], 3, RDMA_WRITE);
	CHECK(filled(p.mr[1].p + 16385, 4096, 1));

	RECV(p.qp[1], 12, NULL, 0, 0);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .id = 4, .from = &p.mr[0], .length = 100, .to = &p.mr[1],
	     .to_offset = 32768, .imm = htonl(5), .ex = ex);
	expect_ok(p.cq[0], 4, RDMA_WRITE);
	wc = expect_ok(p.cq[1], 12, RECV_RDMA_WITH_IMM);
	EQ(wc.byte_len, 100);
	EQ(wc.wc_flags, IBV_WC_WITH_IMM);
	EQ(ntohl(wc.imm_data), 5);
	CHECK(filled(p.mr[1].p + 32768, 100, 1));

	fill(p.mr[1].p + 40960, 5000, 2);
	list[0] = sge(&p.mr[0], 40960, 3000);
	list[1] = sge(&p.mr[0], 50000, 2000);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 5, .list = list, .num_sge = 2, .to = &p.mr[1], .to_offset = 40960,
	     .ex = ex);
	wc = expect_ok(p.cq[0], 5, RDMA_READ);
	EQ(wc.byte_len, 5000);
	CHECK(memcmp(p.mr[0].p + 40960, p.mr[1].p + 40960, 3000) == 0);
	CHECK(memcmp(p.mr[0].p + 50000, p.mr[1].p + 43960, 2000) == 0);

	uint64_t *word = (uint64_t *)(p.mr[1].p + 64), *old = (uint64_t *)p.mr[0].p;
	*word = 0xffffffffffffffff;
	POST(p.qp[0], .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .id = 6, .from = &p.mr[0], .length = 8, .to = &p.mr[1],
	     .to_offset = 64, .compare_add = 43, .ex = ex);
	wc = expect_ok(p.cq[0], 6, FETCH_ADD);
	EQ(wc.byte_len, 8);
	EQ(*word, 42);
	EQ(*old, -1);
	POST(p.qp[0], .opcode = IBV_WR_ATOMIC_CMP_AND_SWP, .id = 7, .from = &p.mr[0], .length = 8, .to = &p.mr[1],
	     .to_offset = 64, .compare_add = 41, .swap = 1, .ex = ex);
	wc = expect_ok(p.cq[0], 7, COMP_SWAP);
	EQ(*word, 42);
	EQ(*old, 42);
	POST(p.qp[0], .opcode = IBV_WR_ATOMIC_CMP_AND_SWP, .id = 8, .from = &p.mr[0], .length = 8, .to = &p.mr[1],
	     .to_offset = 64, .compare_add = 42, .swap = 0x123456789abcdef0, .ex = ex);
	expect_ok(p.cq[0], 8, COMP_SWAP);
	EQ(*word, 0x123456789abcdef0);
	EQ(*old, 42);
	/* Messages of length 0. */
	RECV(p.qp[1], 13, NULL, 0, 0);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 9, .ex = ex);
	expect_ok(p.cq[0], 9, SEND);
	EQ(expect_ok(p.cq[1], 13, RECV).byte_len, 0);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 10, .ex = ex);
	expect_ok(p.cq[0], 10, RDMA_WRITE);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 11, .ex = ex);
	expect_ok(p.cq[0], 11, RDMA_READ);
	no_event();
}

TEST(post_all_operations)
{
	all_operations(false);
}

TEST(post_all_operations_ex)
{
	all_operations(true);
}

/*
 * Inline data up to the size that was granted, in both interfaces; the memory need not be
 * registered.
 */
TEST(inline_up_to_the_limit)
{
	struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));
	struct ibv_cq *cq = make_cq(16);
	uint32_t most = 0;

	/* The most that a queue pair can be created with. */
	for (uint32_t wanted = 1; wanted <= 65536; wanted++) {
		struct ibv_qp_init_attr attr = {
			.send_cq = cq,
			.recv_cq = cq,
			.cap = { .max_send_wr = 4, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = wanted },
			.qp_type = IBV_QPT_RC,
		};
		struct ibv_qp *qp = ibv_create_qp(pd, &attr);

		if (!qp) {
			EQ(errno, EINVAL);
			break;
		}
		/* It may be more than was asked for, not less. */
		CHECK(attr.cap.max_inline_data >= wanted);
		most = wanted = attr.cap.max_inline_data;
		OK(ibv_destroy_qp(qp));
	}
	CHECK(most >= 64);
	for (int ex = 0; ex < 2; ex++) {
		struct pair p = PAIR(.type = IBV_QPT_RC, .inline_data = most, .size = 65536, .ops = ex ? BASIC_OPS : 0);
		struct ibv_qp_attr attr;
		struct ibv_qp_init_attr init;
		uint8_t *memory = pages(65536);
		static const uint32_t sizes[] = { 0, 1, 15, 16, 17, 63, 64, 65, 100, 0xffffffff };

		OK(ibv_query_qp(p.qp[0], &attr, IBV_QP_CAP, &init));
		CHECK(init.cap.max_inline_data >= most);
		fill(memory, 65536, 3);
		for (int i = 0; i < 10; i++) {
			uint32_t size = sizes[i] < most ? sizes[i] : most;
			/* No region has this key. */
			struct ibv_sge list = { (uintptr_t)memory, size, 0xdeadbeef };

			RECV(p.qp[1], i, &p.mr[1], 0, 65536);
			POST(p.qp[0], .opcode = IBV_WR_SEND, .id = i, .list = &list, .num_sge = 1, .flags = IBV_SEND_INLINE,
			     .ex = ex);
			/* The memory is the application's again as soon as it is posted. */
			memset(memory, 0xee, size);
			expect_ok(p.cq[0], i, SEND);
			EQ(expect_ok(p.cq[1], i, RECV).byte_len, size);
			fill(memory, 65536, 3);
			CHECK(memcmp(p.mr[1].p, memory, size) == 0);
			memset(p.mr[1].p, 0, size);
			POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = i, .list = &list, .num_sge = 1, .flags = IBV_SEND_INLINE,
			     .to = &p.mr[1], .to_offset = 100, .ex = ex);
			expect_ok(p.cq[0], i, RDMA_WRITE);
			CHECK(memcmp(p.mr[1].p + 100, memory, size) == 0);
		}
		struct ibv_sge list[3] = { { (uintptr_t)memory, 7, 0 }, { (uintptr_t)memory + 100, 20, 0 },
					   { (uintptr_t)memory + 300, most - 27, 0 } };
		RECV(p.qp[1], 20, &p.mr[1], 0, 65536);
		POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 20, .list = list, .num_sge = 3, .flags = IBV_SEND_INLINE, .ex = ex);
		expect_ok(p.cq[0], 20, SEND);
		EQ(expect_ok(p.cq[1], 20, RECV).byte_len, most);
		CHECK(memcmp(p.mr[1].p, memory, 7) == 0 && memcmp(p.mr[1].p + 7, memory + 100, 20) == 0 &&
		      memcmp(p.mr[1].p + 27, memory + 300, most - 27) == 0);
		/* One byte more. */
		list[2].length = init.cap.max_inline_data - 26;
		int error = post(p.qp[0], &(struct op){ .opcode = IBV_WR_SEND, .id = 21, .list = list, .num_sge = 3,
							.flags = IBV_SEND_INLINE, .ex = ex });
		/* mlx5 says ENOMEM, rxe EINVAL. */
		CHECK(error == EINVAL || error == ENOMEM);
		RECV(p.qp[1], 22, &p.mr[1], 0, 65536);
		POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 22, .from = &p.mr[0], .length = 10, .ex = ex);
		expect_ok(p.cq[0], 22, SEND);
		expect_ok(p.cq[1], 22, RECV);
	}
}

/*
 * Who asks for no inline data is granted what an entry holds anyway: rdma_xclient asks for none and
 * posts 16 bytes so.
 */
TEST(inline_is_granted_unasked)
{
	static const enum ibv_qp_type types[] = { IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD };

	for (int i = 0; i < 6; i++) {
		enum ibv_qp_type type = types[i / 2];
		bool ex = i & 1;
		struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));
		struct ibv_cq *cq = make_cq(16);
		struct region to = region(pd, 65536, ALL);
		struct ibv_qp_init_attr init = {
			.send_cq = cq,
			.recv_cq = cq,
			.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
			.qp_type = type,
		};
		struct ibv_qp_init_attr_ex init_ex = {
			.send_cq = cq,
			.recv_cq = cq,
			.cap = init.cap,
			.qp_type = type,
			.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
			.pd = pd,
			.send_ops_flags = IBV_QP_EX_WITH_SEND,
		};
		struct ibv_qp *qp = MAKE_IF_SUPPORTED(ex ? ibv_create_qp_ex(ctx, &init_ex) : ibv_create_qp(pd, &init));
		uint32_t granted = ex ? init_ex.cap.max_inline_data : init.cap.max_inline_data;
		size_t header = type == IBV_QPT_UD ? 40 : 0;
		uint8_t *memory = pages(granted + 1);
		struct ibv_sge list = { (uintptr_t)memory, granted, 0xdeadbeef };
		struct ibv_ah_attr path = path_to(gid);
		struct conn self = conn(qp->qp_num);
		struct ibv_qp_attr attr;
		struct ibv_ah *ah = NULL;

		CHECK(granted >= 16);
		OK(ibv_query_qp(qp, &attr, IBV_QP_CAP, &init));
		EQ(init.cap.max_inline_data, granted);
		if (type == IBV_QPT_UD) {
			ready_ud(qp, QKEY);
			ah = MAKE(ibv_create_ah(pd, &path));
		} else {
			connect_qp(qp, &self);
		}
		fill(memory, granted, i);
		RECV(qp, 1, &to, 0, 65536);
		struct op op = { .opcode = IBV_WR_SEND, .id = 2, .list = &list, .num_sge = 1, .flags = IBV_SEND_INLINE,
				 .unsignaled = true, .ah = ah, .qpn = qp->qp_num, .qkey = QKEY, .ex = ex };
		OK(post(qp, &op));
		EQ(expect_ok(cq, 1, RECV).byte_len, header + granted);
		CHECK(filled(to.p + header, granted, i));
	}
}

/* Inline has no meaning for a READ. */
TEST(inline_read_is_refused)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .inline_data = 64);
	int error = post(p.qp[0], &(struct op){ .opcode = IBV_WR_RDMA_READ, .id = 1, .from = &p.mr[0], .length = 8, .to = &p.mr[1],
						.flags = IBV_SEND_INLINE });

	if (error)
		EQ(error, EINVAL);
	else
		expect_error(p.cq[0], 1, LOC_QP_OP_ERR);
}

/* A work request after the fence finds what the READ before it brought. */
TEST(fence_after_read)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .size = 2 << 20, .send_wr = 64);
	const uint32_t size = 1 << 20;

	for (unsigned int round = 0; round < 5; round++) {
		fill(p.mr[1].p, size, round);
		memset(p.mr[0].p, 0, size);
		POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 1, .from = &p.mr[0], .length = size, .to = &p.mr[1],
		     .unsignaled = true);
		POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 2, .from = &p.mr[0], .length = size, .to = &p.mr[1],
		     .to_offset = size, .flags = IBV_SEND_FENCE);
		expect_ok(p.cq[0], 2, RDMA_WRITE);
		CHECK(filled(p.mr[0].p, size, round));
		CHECK(filled(p.mr[1].p + size, size, round));
	}
	/* And of an atomic operation. */
	uint64_t *word = (uint64_t *)p.mr[1].p;
	for (uint64_t i = 0; i < 50; i++) {
		*word = 1000 + i;
		POST(p.qp[0], .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .id = 1, .from = &p.mr[0], .length = 8, .to = &p.mr[1],
		     .compare_add = 1, .unsignaled = true);
		POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = i, .from = &p.mr[0], .length = 8, .to = &p.mr[1], .to_offset = 64,
		     .flags = IBV_SEND_FENCE);
		expect_ok(p.cq[0], i, RDMA_WRITE);
		EQ(word[8], 1000 + i);
	}
}

/* An event for solicited completions comes for those messages alone, and for errors. */
TEST(solicited_events)
{
	struct ibv_comp_channel *channel = MAKE(ibv_create_comp_channel(ctx));
	struct pair p = PAIR(.type = IBV_QPT_RC, .channel = channel);

	for (int i = 0; i < 4; i++)
		RECV(p.qp[1], i, &p.mr[1], 0, 64);
	OK(ibv_req_notify_cq(p.cq[1], 1));
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 1, .from = &p.mr[0], .length = 8);
	expect_ok(p.cq[0], 1, SEND);
	CHECK(!channel_event(channel, p.cq[1], QUIET));
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 2, .from = &p.mr[0], .length = 8, .flags = IBV_SEND_SOLICITED);
	expect_ok(p.cq[0], 2, SEND);
	CHECK(channel_event(channel, p.cq[1], TIMEOUT_MS));
	expect_ok(p.cq[1], 0, RECV);
	expect_ok(p.cq[1], 1, RECV);
	/* One event for one arming. */
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 3, .from = &p.mr[0], .length = 8, .flags = IBV_SEND_SOLICITED);
	expect_ok(p.cq[0], 3, SEND);
	CHECK(!channel_event(channel, p.cq[1], QUIET));
	expect_ok(p.cq[1], 2, RECV);
	/* A write with immediate data can be solicited, too. */
	OK(ibv_req_notify_cq(p.cq[1], 1));
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .id = 4, .from = &p.mr[0], .length = 8, .to = &p.mr[1],
	     .flags = IBV_SEND_SOLICITED);
	expect_ok(p.cq[0], 4, RDMA_WRITE);
	CHECK(channel_event(channel, p.cq[1], TIMEOUT_MS));
	expect_ok(p.cq[1], 3, RECV_RDMA_WITH_IMM);
	/* Errors count as solicited. */
	RECV(p.qp[1], 10, &p.mr[1], 0, 64);
	OK(ibv_req_notify_cq(p.cq[1], 1));
	set_state(p.qp[1], IBV_QPS_ERR);
	CHECK(channel_event(channel, p.cq[1], TIMEOUT_MS));
	expect_error(p.cq[1], 10, WR_FLUSH_ERR);
}

/* Any completion, after that the stronger of two armings. */
TEST(notify_any)
{
	struct ibv_comp_channel *channel = MAKE(ibv_create_comp_channel(ctx));
	struct pair p = PAIR(.type = IBV_QPT_RC, .channel = channel);

	OK(ibv_req_notify_cq(p.cq[0], 0));
	OK(ibv_req_notify_cq(p.cq[0], 1));
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
	CHECK(channel_event(channel, p.cq[0], TIMEOUT_MS));
	expect_ok(p.cq[0], 1, RDMA_WRITE);
	CHECK(!channel_event(channel, p.cq[0], QUIET));
	/* Many times over: none is lost. */
	for (uint64_t i = 0; i < 200; i++) {
		OK(ibv_req_notify_cq(p.cq[0], 0));
		POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = i, .from = &p.mr[0], .length = 8, .to = &p.mr[1]);
		CHECK(channel_event(channel, p.cq[0], TIMEOUT_MS));
		expect_ok(p.cq[0], i, RDMA_WRITE);
	}
}

/*
 * Work requests that are not signaled complete without a word, and the next signaled one frees
 * them.
 */
TEST(selective_signaling)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .send_wr = 8, .size = 65536);

	for (uint64_t i = 0; i < 64; i++) {
		*(uint64_t *)(p.mr[0].p + 8 * i) = i;
		POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = i, .from = &p.mr[0], .offset = 8 * i, .length = 8, .to = &p.mr[1],
		     .to_offset = 8 * i, .unsignaled = i % 8 != 7);
		if (i % 8 == 7)
			expect_ok(p.cq[0], i, RDMA_WRITE);
	}
	expect_none(p.cq[0]);
	CHECK(memcmp(p.mr[0].p, p.mr[1].p, 512) == 0);
}

/* Without a signaled one the queue fills up. */
TEST(full_send_queue)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .send_wr = 8);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	unsigned int posted = 0;
	int error;

	OK(ibv_query_qp(p.qp[0], &attr, IBV_QP_CAP, &init));
	for (;;) {
		error = post(p.qp[0], &(struct op){ .opcode = IBV_WR_RDMA_WRITE, .id = posted, .from = &p.mr[0], .length = 8,
						    .to = &p.mr[1], .unsignaled = true });
		if (error)
			break;
		posted++;
		CHECK(posted <= init.cap.max_send_wr);
	}
	EQ(error, ENOMEM);
	CHECK(posted >= 8);
	expect_none(p.cq[0]);
}

TEST(full_receive_queue)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .recv_wr = 16);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	unsigned int posted = 0;
	int error;

	OK(ibv_query_qp(p.qp[0], &attr, IBV_QP_CAP, &init));
	while (!(error = post_recv(p.qp[0], posted, &p.mr[0], 0, 8)))
		CHECK(++posted <= init.cap.max_recv_wr);
	EQ(error, ENOMEM);
	CHECK(posted >= 16);
}

TEST(sq_sig_all)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .sig_all = true);

	for (uint64_t i = 0; i < 5; i++)
		POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = i, .from = &p.mr[0], .length = 8, .to = &p.mr[1],
		     .unsignaled = true);
	for (uint64_t i = 0; i < 5; i++)
		expect_ok(p.cq[0], i, RDMA_WRITE);
}

/* A list is posted up to its first bad work request, which is named. */
TEST(post_list_up_to_bad)
{
	struct pair p = PAIR(.type = IBV_QPT_RC);
	struct ibv_sge list = sge(&p.mr[0], 0, 8), many[64];
	struct ibv_send_wr wr[4], *bad = NULL;
	struct ibv_recv_wr rwr[3], *bad_recv = NULL;

	for (int i = 0; i < 64; i++)
		many[i] = list;
	for (int i = 0; i < 4; i++)
		wr[i] = (struct ibv_send_wr){ .wr_id = i, .next = i < 3 ? &wr[i + 1] : NULL, .sg_list = &list, .num_sge = 1,
					      .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
					      .wr.rdma = { (uintptr_t)p.mr[1].p, p.mr[1].mr->rkey } };
	wr[2].sg_list = many;
	wr[2].num_sge = 64;
	CHECK(RESULT(ibv_post_send(p.qp[0], wr, &bad)) != 0);
	CHECK(bad == &wr[2]);
	expect_ok(p.cq[0], 0, RDMA_WRITE);
	expect_ok(p.cq[0], 1, RDMA_WRITE);
	expect_none(p.cq[0]);
	for (int i = 0; i < 3; i++)
		rwr[i] = (struct ibv_recv_wr){ .wr_id = i, .next = i < 2 ? &rwr[i + 1] : NULL, .sg_list = &list, .num_sge = 1 };
	rwr[1].sg_list = many;
	rwr[1].num_sge = 64;
	CHECK(RESULT(ibv_post_recv(p.qp[0], rwr, &bad_recv)) != 0);
	CHECK(bad_recv == &rwr[1]);
	POST(p.qp[1], .opcode = IBV_WR_SEND, .id = 5, .from = &p.mr[1], .length = 8);
	expect_ok(p.cq[1], 5, SEND);
	expect_ok(p.cq[0], 0, RECV);
}

/* An aborted list leaves nothing behind; one with an error posts nothing at all. */
TEST(ex_abort_and_error)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .ops = BASIC_OPS, .send_wr = 8);
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(p.qp[0]);
	struct ibv_sge many[64];

	for (int i = 0; i < 64; i++)
		many[i] = sge(&p.mr[0], 0, 8);
	fill(p.mr[0].p, 64, 4);
	for (int i = 0; i < 20; i++) {
		ibv_wr_start(ex);
		for (int j = 0; j < 8; j++) {
			ex->wr_id = j;
			ex->wr_flags = IBV_SEND_SIGNALED;
			ibv_wr_rdma_write(ex, p.mr[1].mr->rkey, (uintptr_t)p.mr[1].p);
			ibv_wr_set_sge(ex, p.mr[0].mr->lkey, (uintptr_t)p.mr[0].p, 64);
		}
		ibv_wr_abort(ex);
	}
	expect_none(p.cq[0]);
	ibv_wr_start(ex);
	ex->wr_id = 1;
	ibv_wr_rdma_write(ex, p.mr[1].mr->rkey, (uintptr_t)p.mr[1].p);
	ibv_wr_set_sge(ex, p.mr[0].mr->lkey, (uintptr_t)p.mr[0].p, 64);
	ibv_wr_rdma_write(ex, p.mr[1].mr->rkey, (uintptr_t)p.mr[1].p);
	ibv_wr_set_sge_list(ex, 64, many);
	CHECK(ibv_wr_complete(ex) != 0);
	expect_none(p.cq[0]);
	CHECK(all_bytes(p.mr[1].p, 64, 0));
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 9, .from = &p.mr[0], .length = 64, .to = &p.mr[1], .ex = true);
	expect_ok(p.cq[0], 9, RDMA_WRITE);
	CHECK(filled(p.mr[1].p, 64, 4));
}

/* Operations that the type of queue pair does not have cannot be asked for. */
TEST(ex_ops_by_type)
{
	struct ibv_pd *pd = MAKE(ibv_alloc_pd(ctx));
	struct ibv_cq *cq = make_cq(16);
	struct ibv_qp_init_attr_ex attr = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = pd,
	};
	static const struct {
		enum ibv_qp_type type;
		uint64_t ops;
	} refused[] = {
		{ IBV_QPT_UD, IBV_QP_EX_WITH_RDMA_WRITE },
		{ IBV_QPT_UD, IBV_QP_EX_WITH_RDMA_READ },
		{ IBV_QPT_UD, IBV_QP_EX_WITH_BIND_MW },
		{ IBV_QPT_UC, IBV_QP_EX_WITH_RDMA_READ },
		{ IBV_QPT_UC, IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD },
		{ IBV_QPT_RC, IBV_QP_EX_WITH_TSO },
	};

	for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
		attr.qp_type = refused[i].type;
		attr.send_ops_flags = refused[i].ops;
		MAKE_FAILS(EOPNOTSUPP, ibv_create_qp_ex(ctx, &attr));
	}
}

/* States in which nothing can be posted. */
TEST(post_in_wrong_state)
{
	struct pair p = PAIR(.type = IBV_QPT_RC, .reset = true);
	struct op op = { .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = 8, .to = &p.mr[1] };
	struct conn to = conn(p.qp[1]->qp_num);

	FAILS(EINVAL, post(p.qp[0], &op));
	FAILS(EINVAL, post_recv(p.qp[0], 1, &p.mr[0], 0, 8));
	to_init(p.qp[0], REMOTE);
	FAILS(EINVAL, post(p.qp[0], &op));
	RECV(p.qp[0], 1, &p.mr[0], 0, 8);
	to_rtr(p.qp[0], &to);
	FAILS(EINVAL, post(p.qp[0], &op));
	RECV(p.qp[0], 2, &p.mr[0], 0, 8);
	/* In the error state all is flushed, what is posted there, too. */
	set_state(p.qp[0], IBV_QPS_ERR);
	expect_error(p.cq[0], 1, WR_FLUSH_ERR);
	expect_error(p.cq[0], 2, WR_FLUSH_ERR);
	OK(post(p.qp[0], &op));
	expect_error(p.cq[0], 1, WR_FLUSH_ERR);
	RECV(p.qp[0], 3, &p.mr[0], 0, 8);
	expect_error(p.cq[0], 3, WR_FLUSH_ERR);
}

/* Longer than any slice or table of pages. */
TEST(large_messages)
{
	const size_t size = 24 << 20;
	struct pair p = PAIR(.type = IBV_QPT_RC, .size = size);

	fill(p.mr[0].p, size, 5);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_WRITE, .id = 1, .from = &p.mr[0], .length = size, .to = &p.mr[1]);
	expect_ok(p.cq[0], 1, RDMA_WRITE);
	CHECK(filled(p.mr[1].p, size, 5));
	memset(p.mr[0].p, 0, size);
	POST(p.qp[0], .opcode = IBV_WR_RDMA_READ, .id = 2, .from = &p.mr[0], .length = size, .to = &p.mr[1]);
	expect_ok(p.cq[0], 2, RDMA_READ);
	CHECK(filled(p.mr[0].p, size, 5));
	memset(p.mr[1].p, 0, size);
	RECV(p.qp[1], 3, &p.mr[1], 0, size);
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 3, .from = &p.mr[0], .length = size);
	expect_ok(p.cq[0], 3, SEND);
	EQ(expect_ok(p.cq[1], 3, RECV).byte_len, size);
	CHECK(filled(p.mr[1].p, size, 5));
}

/*
 * As many scatter/gather entries as there may be, on both sides; those of no length are nothing,
 * whatever their key.
 */
TEST(post_max_sge)
{
	uint32_t most = dev.orig_attr.max_sge;
	struct pair p = PAIR(.type = IBV_QPT_RC, .sge = most, .size = 65536);
	struct ibv_sge *from = calloc(most, sizeof(*from)), *to = calloc(most, sizeof(*to));
	struct ibv_recv_wr *bad, wr = { .wr_id = 10, .sg_list = to, .num_sge = most };
	uint8_t *wanted = pages(65536);
	size_t length = 0, at = 0;

	fill(p.mr[0].p, 65536, 6);
	for (uint32_t i = 0; i < most; i++) {
		from[i] = sge(&p.mr[0], i * 500, i % 3 == 2 ? 0 : 100 + i);
		if (from[i].length == 0)
			from[i].lkey = 0xbad;
		memcpy(wanted + length, p.mr[0].p + i * 500, from[i].length);
		length += from[i].length;
	}
	for (uint32_t i = 0; i < most; i++)
		to[i] = sge(&p.mr[1], i * 600, 200);
	OK(ibv_post_recv(p.qp[1], &wr, &bad));
	POST(p.qp[0], .opcode = IBV_WR_SEND, .id = 1, .list = from, .num_sge = most);
	expect_ok(p.cq[0], 1, SEND);
	EQ(expect_ok(p.cq[1], 10, RECV).byte_len, length);
	for (uint32_t i = 0; i < most && at < length; i++) {
		size_t part = length - at < 200 ? length - at : 200;

		CHECK(memcmp(p.mr[1].p + i * 600, wanted + at, part) == 0);
		CHECK(all_bytes(p.mr[1].p + i * 600 + part, 600 - part, 0));
		at += part;
	}
	EQ(at, length);
}
